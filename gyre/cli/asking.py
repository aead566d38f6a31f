"""Shell. Commands that ask a run something: `gyre sql`, `tail`, `consume`, `tree`, `replay`."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyre.cli.apps import CONSUMERS, RunPath, app
from gyre.cli.wiring import config_of, find_run, plain_console, say, seen_policy, until_interrupted, with_log
from gyre.errors import ConfigError, MissingError

if TYPE_CHECKING:
    from gyre.events.codec import Recorded
    from gyre.events.log import Log


@app.command(epilog='Example: `gyre sql runs/quickstart "select step, loss from steps"`')
def sql(
    run_path: RunPath,
    query: Annotated[str, typer.Argument(help="One SELECT over the run's tables; see docs/tables.md.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row.")] = False,
) -> None:
    """Ask a running or a finished run in SQL."""
    import orjson
    from rich.table import Table

    from gyre.projections.sql_service import sql as ask

    answer = ask(find_run(run_path).path, query, lambda text: print(text, file=sys.stderr))
    if as_json:
        for row in answer.to_pylist():
            print(orjson.dumps(row, default=str).decode())
        return
    rows = [{name: "" if value is None else str(value) for name, value in row.items()} for row in answer.to_pylist()]
    console = plain_console()
    widths = [max([len(name), *(len(row[name]) for row in rows)]) + 2 for name in answer.column_names]
    if console.is_terminal and sum(widths) > console.width:  # one block a row beats columns that nobody can read
        for row in rows:
            block = "\n".join(f"{name:<{max(map(len, row))}}  {value}" for name, value in row.items())
            console.print(block, "", soft_wrap=True)
        return
    table = Table(*answer.column_names, box=None)
    for row in rows:
        table.add_row(*row.values())
    plain_console(max(sum(widths), console.width)).print(table)


@app.command(epilog="Example: `gyre tail runs/quickstart --type call.` ")
def tail(
    run_path: RunPath,
    start: Annotated[int, typer.Option("--from", help="First sequence; 0: only what comes from now on.", min=0)] = 1,
    only: Annotated[str, typer.Option("--type", help="Only types that begin with this.")] = "",
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="Wait for more while the run goes on.")
    ] = True,
) -> None:
    """Print events as they come, one line each, until the run is over."""
    from gyre.events.access import follow_run
    from gyre.projections.lines import event_line

    def show(recorded: "Recorded") -> None:
        line = event_line(recorded)
        if line.startswith(only, line.index(" ") + 1):
            print(line, flush=True)

    async def show_past(log: "Log", live: bool) -> None:
        last = await log.last_seq()
        if start and start <= last:
            async for recorded in log.read(start, until=last):
                show(recorded)

    if follow:
        until_interrupted(follow_run(find_run(run_path), show, start=start))
    else:
        with_log(run_path, show_past)


@app.command(
    epilog="Examples: `gyre consume meter runs/quickstart --no-follow` - `gyre consume mine.py:alert runs/quickstart`"
)
def consume(
    name: Annotated[
        str, typer.Argument(metavar="CONSUMER", help="module:function, file.py:function, `loops` or `meter`.")
    ],
    run_path: RunPath,
    start: Annotated[
        str, typer.Option("--from", help="The first time: beginning, now, a sequence, or a time (ISO 8601).")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="Wait for more while the run goes on.")
    ] = True,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Its state and place. Default: RUN_DIR/consumers/NAME.json.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget the checkpoint.")] = False,
) -> None:
    """Run a consumer over a run's events: its state is exact after any crash, and the run is not disturbed."""
    from gyre.events.checkpoint import Checkpoint
    from gyre.events.consuming import consume as run_consumer
    from gyre.events.consuming import find_consumer

    consumer = find_consumer(name, CONSUMERS)
    path = checkpoint or run_path / "consumers" / f"{consumer.name}.json"

    async def work(log: "Log", live: bool) -> None:
        with Checkpoint(path) as held:
            if restart:
                held.discard()
            state = await run_consumer(consumer, log, held, start=start or None, follow=follow and live, say=say)
        if consumer.report:
            print(consumer.report(state), flush=True)

    with_log(run_path, work)


@app.command(epilog="Examples: `gyre tree runs/quickstart g00000-0` - `gyre tree runs/quickstart g00000-0 --text`")
def tree(
    run_path: RunPath,
    execution: Annotated[str, typer.Argument(help="Execution, as in g00000-0. Default: the one with most calls.")] = "",
    text: Annotated[bool, typer.Option("--text", help="Also what each call read (<) and said (>).")] = False,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="Whose tokenizer reads it. Default: policy.path of its config.")
    ] = None,
) -> None:
    """Draw the calls of one execution as a tree."""
    from gyre.projections.draw import Decode, Sketch

    decode: Decode | None = None
    if text:
        from gyre.agents.checkpoint import load_renderer

        tokenizer = load_renderer(seen_policy(policy or config_of(run_path).policy.path)).tokenizer
        decode = partial(tokenizer.decode, skip_special_tokens=False)

    async def draw(log: "Log", live: bool) -> None:
        sketch = Sketch(execution)
        last = await log.last_seq()
        if last:
            async for recorded in log.read(1, until=last):
                sketch.evolve(recorded)
        print(sketch.text(decode))

    with_log(run_path, draw)


@app.command(epilog="Examples: `gyre replay runs/quickstart --verify` - `gyre replay runs/quickstart --verify --train`")
def replay(
    run_path: RunPath,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with the recorded digests.")] = True,
    train: Annotated[bool, typer.Option("--train", help="Take the recorded steps again as well, on CPU.")] = False,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="What the run began with. Default: policy.path of its config.")
    ] = None,
) -> None:
    """Rebuild tables, decisions and batches from the log alone, and compare them with what was recorded.

    With --train also the weights: from the policy that the run began with, step by step.
    """
    from gyre.projections.replay import verify as check
    from gyre.workers import scheduler

    async def rebuild(log: "Log", live: bool) -> None:
        if not await log.last_seq():
            raise MissingError(f"{run_path}: the log has no events yet")
        verdict = await check(log, scheduler=scheduler)
        print(verdict.text())
        if not verdict.ok:
            raise typer.Exit(1)
        if train:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
            from gyre.workers.doctor import versions
            from gyre.workers.ranks import leading
            from gyre.workers.retrain import retrain

            with leading() as ranks:
                show = partial(print, flush=True)
                num = await retrain(log, policy, versions=versions(), show=show, ranks=ranks)
            print(f"same weights as recorded: {num} steps" if num else "no step is recorded: nothing to train")

    if not verify:
        raise ConfigError("gyre replay: nothing to do; add --verify")
    if train:
        config = config_of(run_path)
        policy = seen_policy(policy or config.policy.path)
        if config.cells.num_ranks > 1:
            _as_ranks(config.cells.num_ranks)
    with_log(run_path, rebuild)


def _as_ranks(num_ranks: int) -> None:
    """This command, as so many ranks of one host; returns on the first of them."""
    from gyre.events.server import free_ports
    from gyre.workers.cell import torchrun

    if "WORLD_SIZE" not in os.environ:
        meet = f"127.0.0.1:{free_ports(1)[0]}"
        program = ("-m", "gyre.cli", *sys.argv[1:])
        argv = torchrun(program, num_hosts=1, host=0, ranks_per_host=num_ranks, rendezvous=meet)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(argv[0], argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from gyre.workers.ranks import follow, is_follower
    from gyre.workers.trainer import Trainer

    if is_follower():
        follow(Trainer)
        raise typer.Exit(0)
