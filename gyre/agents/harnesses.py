"""Pure. How each harness is started: (recipe, session's address, instruction, limits) -> Launch.

A Launch is all that a sandbox needs: argv, environment and files, with the paths that the harness sees.
Invariant: no recipe changes its harness; what it needs differently goes through its own settings.
"""

from collections.abc import Mapping

from gyre.agents import npm_harnesses
from gyre.agents.places import Places
from gyre.agents.recipe import API_KEY, HELPER_MODEL, POLICY_MODEL, Launch, Order, Recipe
from gyre.errors import ConfigError

__all__ = ["HELPER_MODEL", "POLICY_MODEL", "RECIPES", "Launch", "Recipe", "find_recipe", "launch"]

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="reference",
            kind="file",
            files=(("reference_harness.py", "reference_harness.py"),),
            about="one file of the standard library; comes with gyre",
        ),
        Recipe(
            name="reference-team",
            kind="file",
            files=(("reference_harness.py", "reference_harness.py"),),
            about="the same, with sub-agents and summaries: its histories branch",
        ),
        Recipe(
            name="mini-swe-agent",
            kind="venv",
            version="2.4.6",
            files=(("mini.yaml", "mini_swe_agent.yaml"), ("gyre_mini_model.py", "mini_swe_agent_model.py")),
            about="unmodified, in an environment of its own",
        ),
        *npm_harnesses.RECIPES,
        Recipe(name="command", kind="command", about="argv from harness.command of the config"),
    )
}


def find_recipe(name: str) -> Recipe:
    """Raises ConfigError for a name that is not in the registry."""
    if name not in RECIPES:
        raise ConfigError(f"harness.name: there is no harness {name!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def launch(
    recipe: Recipe,
    *,
    base_url: str,
    instruction: str,
    places: Places,
    max_turns: int,
    model: str,
    python: str,
    folder: str = "",
    command: tuple[str, ...] = (),
    context_tokens: int = 2048,
    max_tokens: int = 64,
    pause_s: float = 0.0,
) -> Launch:
    """How to start `recipe` on one task.

    base_url: `http://host:port/s/<session>/v1` as the harness reaches it. python: an interpreter inside the
    sandbox. folder: where it is installed, or `harness.folder`. command: `harness.command`. context_tokens: of
    the engine. max_tokens: of one reply. pause_s: of the reference harness. Raises ConfigError.
    """
    if start := npm_harnesses.LAUNCHES.get(recipe.name):
        return start(
            Order(
                base_url=base_url,
                instruction=instruction,
                places=places,
                max_turns=max_turns,
                model=model,
                context_tokens=context_tokens,
                max_tokens=max_tokens,
                folder=folder,
            )
        )
    env = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": API_KEY,
        "GYRE_MODEL": model,
        "GYRE_MAX_TURNS": str(max_turns),
    }
    match recipe.name:
        case "reference" | "reference-team":
            argv: tuple[str, ...] = (python, "-I", "-S", f"{places.config}/reference_harness.py")
            env["GYRE_TASK"] = instruction
            if recipe.name == "reference-team":
                env["GYRE_TEAM"] = "1"
            if pause_s:
                env["GYRE_PAUSE_S"] = str(pause_s)
        case "mini-swe-agent":
            argv = (f"{folder}/bin/mini", f"--task={instruction}", f"--model={model}")
            argv += ("-c", f"{places.config}/mini.yaml", "-c", f"agent.step_limit={max_turns}")
            env |= {
                "PYTHONPATH": places.config,
                "PYTHONSAFEPATH": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "MSWEA_CONFIGURED": "true",
                "MSWEA_SILENT_STARTUP": "1",
                # Its record of the run goes here too, and away with it: the log holds what counts.
                "MSWEA_GLOBAL_CONFIG_DIR": f"{places.home}/mini-swe-agent",
            }
        case _:
            if not command:
                raise ConfigError(
                    "config: harness.command is empty: give argv, with {base_url}, {instruction}, {workspace}, {folder}"
                )
            values = {"{base_url}": base_url, "{instruction}": instruction, "{workspace}": places.workspace}
            values["{folder}"] = folder
            argv = tuple(_fill(word, values) for word in command)
            env["GYRE_TASK"] = instruction
    return Launch(argv=argv, env=env, files=recipe.files)


def _fill(word: str, values: Mapping[str, str]) -> str:
    """Replace placeholders from left to right, never inside what was filled in (an instruction may hold braces)."""
    filled, rest = "", word
    while rest:
        found = min((key for key in values if key in rest), key=rest.index, default="")
        if not found:
            break
        before, _, rest = rest.partition(found)
        filled += before + values[found]
    return filled + rest
