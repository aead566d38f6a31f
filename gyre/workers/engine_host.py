"""Shell. One rollout engine: SGLang's HTTP server in this process, and two routes of gyre's own.

    python -m gyre.workers.engine_host --model DIR --port PORT

Invariant: the engine serves exactly one verified version at a time. Weights are flipped only after
every checksum of a manifest was right; requests in flight are paused for the flip, never aborted.

Direction: manifest -> shadow buffer (Mooncake reads) -> verified -> paused -> loaded -> continued.

Routes beside SGLang's: `POST /gyre/pull_weights`, `POST /gyre/release`, `POST /gyre/restore`, `GET /gyre/engine`.

Without a GPU the workers are forked after the imports instead of spawned, which saves each of them
some ten seconds. The process ends with its parent, and all its children end with it.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil
import torch

from gyre.errors import GyreError, MissingError, TransferError
from gyre.workers.kv_store import engine_flags
from gyre.workers.manifest import WeightManifest, check_manifest
from gyre.workers.policy_files import read_axes
from gyre.workers.sglang_cpu import define_torchvision_ops
from gyre.workers.transfer import TransferEndpoint, WeightSink

TEMP_PREFIX = "gyre-engine-"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PARENT_POLL_S = 0.25
IDLE_S = 5.0


def main() -> None:
    args = _parse(sys.argv[1:])
    # Blocked before any thread or child exists, so all of them inherit it and only the watcher sees
    # these signals. The server would drain for many seconds; a rollout has nothing worth draining.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    tempfile.tempdir = tempfile.mkdtemp(prefix=TEMP_PREFIX)
    threading.Thread(target=_watch, args=(os.getppid(),), name="watch", daemon=True).start()
    try:
        _serve(args)
    except (GyreError, SystemExit, Exception) as error:  # noqa: BLE001 - reported, and the process ends
        print(f"engine host: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    _end(1)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine_host", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="checkpoint in Hugging Face format")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--version", default=0, type=int, help="policy version of the checkpoint")
    parser.add_argument("--context-tokens", default=2048, type=int)
    parser.add_argument("--max-total-tokens", default=32768, type=int)
    parser.add_argument("--max-running-requests", default=64, type=int)
    parser.add_argument("--transfer-protocol", default="tcp", choices=("tcp", "rdma"))
    parser.add_argument("--transfer-device", default="")
    parser.add_argument("--kv-page-tokens", default=0, type=int, help="KV also goes to the store that MOONCAKE_* names")
    parser.add_argument("sglang", nargs="*", help="after `--`: more flags of sglang.launch_server")
    return parser.parse_args(argv)


def server_flags(args: argparse.Namespace, *, gpu: bool) -> list[str]:
    """The flags of `sglang.launch_server`."""
    flags = [
        "--model-path", str(args.model), "--host", args.host, "--port", str(args.port),
        "--weight-version", str(args.version), "--context-length", str(args.context_tokens),
        "--max-total-tokens", str(args.max_total_tokens), "--max-running-requests", str(args.max_running_requests),
        "--skip-server-warmup", "--log-level", "warning",
    ]  # fmt: skip
    if args.kv_page_tokens:
        flags += engine_flags(args.kv_page_tokens, gpu=gpu)
    if gpu:
        return [*flags, "--enable-memory-saver", *args.sglang]
    return [
        *flags, "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--grammar-backend", "none", "--dtype", "float32", "--mem-fraction-static", "0.2",
        "--disable-overlap-schedule", "--sleep-on-idle", *args.sglang,
    ]  # fmt: skip


def _serve(args: argparse.Namespace) -> None:
    gpu = torch.cuda.is_available()
    if not gpu:
        define_torchvision_ops()
    gc.disable()  # thousands of modules that live for ever: collecting meanwhile costs a fifth of the start
    try:
        from sglang.srt.entrypoints import engine, http_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
    except ImportError as error:
        raise MissingError(f"sglang: {error}; install the engine with `make setup`") from None
    if not gpu:
        _register_model(args.model)
    gc.freeze()
    gc.enable()

    if not gpu:
        stock = engine._set_envs_and_config

        def set_envs_and_fork(server_args: Any) -> None:
            stock(server_args)
            multiprocessing.set_start_method("fork", force=True)

        engine._set_envs_and_config = set_envs_and_fork
    # It calls the server over HTTP before the server listens, and logs that as a failure.
    http_server._freeze_gc_after_server_warmup = lambda server_args: None
    _add_routes(http_server, EngineState(args))
    load_plugins()
    http_server.launch_server(prepare_server_args(server_flags(args, gpu=gpu)))


def _register_model(model: Path) -> None:
    """Import the one model class that is served instead of all two hundred.

    With a package of external models named, SGLang imports its own only when a class is not found;
    the package that is named here has none.
    """
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "sglang.srt.plugins")
    from sglang.srt.models.registry import ModelRegistry

    family = msgspec.json.decode((model / "config.json").read_bytes())["model_type"]
    try:
        found = importlib.import_module(f"sglang.srt.models.{family}").EntryClass
    except (ImportError, AttributeError):
        return
    for entry in found if isinstance(found, list) else [found]:
        ModelRegistry.models.setdefault(entry.__name__, entry)


class EngineState:
    """What this process knows beside SGLang: the version, its digest and the shadow buffer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.version: int = args.version
        self.digest = ""
        """Empty until the first pull: the checkpoint on disk is taken as it is."""
        self.shapes = read_axes(args.model)
        self.released = False
        self.lock = asyncio.Lock()
        self._link = (args.host, args.transfer_protocol, args.transfer_device)
        self._sink: WeightSink | None = None

    def sink(self) -> WeightSink:
        if self._sink is None:
            self._sink = WeightSink(TransferEndpoint(*self._link))
        return self._sink


async def pull_weights(state: EngineState, tokenizer: Any, manifest: WeightManifest) -> dict[str, Any]:
    """Fetch, verify and flip one version. Raises TransferError with nothing changed when it is not whole."""
    async with state.lock:
        clock = _Clock()
        check_manifest(manifest, state.shapes)
        if manifest.version == state.version and state.digest not in ("", manifest.digest):
            raise TransferError(
                f"version {manifest.version} is served with digest {state.digest[:12]}, the manifest says "
                f"{manifest.digest[:12]}; publish other weights under another version"
            )
        sink = state.sink()
        tensors = await asyncio.to_thread(sink.pull, manifest, lambda: clock.lap("fetch"))
        clock.lap("verify")
        await _flip(tokenizer, sink, tensors, manifest.version, clock)
        state.version, state.digest = manifest.version, manifest.digest
        return {
            "version": manifest.version,
            "digest": manifest.digest,
            "num_bytes": manifest.num_bytes,
            "seconds": clock.laps,
        }


async def _flip(
    tokenizer: Any, sink: WeightSink, tensors: dict[str, torch.Tensor], version: int, clock: "_Clock"
) -> None:
    from sglang.srt.managers import io_struct
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    base = sink.buffer.data_ptr()
    layout = []
    for name, tensor in tensors.items():
        start = tensor.data_ptr() - base
        end = start + tensor.nbytes
        layout.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, tensor.nbytes))
    bucket = {"flattened_tensor": sink.buffer, "metadata": layout}
    ranks = range(tokenizer.server_args.tp_size)
    update = io_struct.UpdateWeightsFromTensorReqInput(
        # One shared-memory handle a rank: a handle can be opened once.
        serialized_named_tensors=[MultiprocessingSerializer.serialize(bucket) for _ in ranks],
        load_format="flattened_bucket",
        flush_cache=False,
        abort_all_requests=False,
        weight_version=str(version),
    )
    was_paused = tokenizer.is_pause
    await tokenizer.pause_generation(io_struct.PauseGenerationReqInput(mode="in_place"))
    try:
        _demand(await tokenizer.begin_weight_update(io_struct.BeginWeightUpdateReqInput()))
        clock.lap("pause")
        try:
            _demand(await tokenizer.update_weights_from_tensor(update))
        finally:
            _demand(await tokenizer.end_weight_update(io_struct.EndWeightUpdateReqInput()))
    finally:
        if not was_paused:  # whoever paused it before continues it
            await tokenizer.continue_generation(io_struct.ContinueGenerationReqInput(torch_empty_cache=False))
    clock.lap("load")


def _demand(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        # Some tensors may be new and others old: an engine in that state must not serve on.
        print(f"engine host: weights are torn: {message}", file=sys.stderr, flush=True)
        _end(1)


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self._last = now - self._last, now


def _add_routes(http_server: Any, state: EngineState) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    def tokenizer() -> Any:
        return http_server.get_global_state().tokenizer_manager

    async def pull(request: Request) -> JSONResponse:
        try:
            manifest = msgspec.json.decode(await request.body(), type=WeightManifest)
            return JSONResponse(await pull_weights(state, tokenizer(), manifest))
        except msgspec.DecodeError as error:
            return JSONResponse({"reason": f"manifest: {error}"}, status_code=400)
        except TransferError as error:
            return JSONResponse({"reason": str(error)}, status_code=409)

    async def release() -> JSONResponse:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        # SGLang's scheduler dies when it is told twice; who has lost an answer asks again, and several may ask at once.
        async with state.lock:
            # With requests in flight it dies as well.
            if num_running := len(tokenizer().rid_to_state):
                return JSONResponse({"reason": f"{num_running} requests are running; drain first"}, status_code=409)
            if not state.released:
                # And as long as it has not put away the batch whose last answer has gone out: a flush tells.
                give_up = time.monotonic() + IDLE_S
                while not (await tokenizer().flush_cache()).success:
                    if time.monotonic() > give_up:
                        return JSONResponse({"reason": f"not idle after {IDLE_S:g} s; drain first"}, status_code=409)
                    await asyncio.sleep(0.01)
                await tokenizer().release_memory_occupation(ReleaseMemoryOccupationReqInput(), None)
                state.released = True
        return JSONResponse({})

    async def restore() -> JSONResponse:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        async with state.lock:
            if state.released:
                await tokenizer().resume_memory_occupation(ResumeMemoryOccupationReqInput(), None)
                state.released = False
        return JSONResponse({})

    async def engine() -> JSONResponse:
        up = tokenizer().server_status.value == "Up"
        return JSONResponse(
            {
                "ready": up,
                "version": state.version,
                "digest": state.digest,
                "model_path": tokenizer().model_path,
                "num_running": len(tokenizer().rid_to_state),
                "paused": tokenizer().is_pause,
            }
        )

    http_server.app.add_api_route("/gyre/pull_weights", pull, methods=["POST"])
    http_server.app.add_api_route("/gyre/release", release, methods=["POST"])
    http_server.app.add_api_route("/gyre/restore", restore, methods=["POST"])
    http_server.app.add_api_route("/gyre/engine", engine, methods=["GET"])


def _watch(parent: int) -> None:
    """Waits for a stop signal or the end of the parent; then ends everything."""
    while signal.sigtimedwait(STOP_SIGNALS, PARENT_POLL_S) is None:
        if os.getppid() != parent:
            _end(1)
    _end(0)


def _end(code: int) -> NoReturn:
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=2.0)
    temp = Path(tempfile.gettempdir())
    if temp.name.startswith(TEMP_PREFIX):  # its own, never the machine's
        shutil.rmtree(temp, ignore_errors=True)
    os._exit(code)


if __name__ == "__main__":
    main()
