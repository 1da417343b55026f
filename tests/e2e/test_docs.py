"""The documentation says what the code does: commands, keys, metrics, links and experiments exist."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import typer
import yaml

from megappo.config.checks import check_config
from megappo.config.load import read_config
from megappo.config.validate import key_names
from megappo_cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXPERIMENTS = sorted((ROOT / "yaml_configs").glob("*.yaml"))
OTHER_TOOLS = {"migrating_from_verl.md", "configuration.md"}  # verl's keys; generated from the schema itself
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return page.name


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def code_spans(page: Path) -> list[str]:
    text = re.sub(r"\$`.*?`\$", "", prose(page))  # mathematics
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", text)]


# --- YAML, JSON and Python -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_yaml_blocks_are_experiments_or_parts_of_one(page, tmp_path):
    for body in blocks(page, "yaml"):
        tree = yaml.safe_load(body)
        file = tmp_path / "block.yaml"
        file.write_text(body if "model" in tree else body + "\nmodel: {path: somewhere}\n")
        read_config(file)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_json_and_python_blocks_parse(page):
    for body in blocks(page, "json"):
        for line in body.splitlines():
            json.loads(line)
    for body in blocks(page, "python"):
        compile(body, page.name, "exec")


# --- links ---------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {target} does not exist"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}#{anchor} is no heading"


# --- commands ------------------------------------------------------------------------------------------


def command_lines(page: Path) -> Iterator[list[str]]:
    """Every command of the page as words, from blocks and from code spans."""
    lines = [line for body in blocks(page, "", "bash", "sh", "console") for line in body.splitlines()]
    for line in [*lines, *code_spans(page)]:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if len(words) > 1:
            yield words


def megappo_words(words: list[str]) -> list[str] | None:
    """What `megappo` is given by a command, however it is started; None for other commands."""
    if words[0] == "megappo":
        return words[1:]
    if words[0] == "megappo-ckpt":
        return ["ckpt", *words[1:]]
    if "megappo_cli" in words:
        return words[words.index("megappo_cli") + 1 :]
    if words[0] == "launch/torchrun.sh":
        return next((words[i:] for i, word in enumerate(words) if word in ("train", "sft", "reward-model")), [])
    return None


def check_megappo(words: list[str], where: str) -> None:
    command = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in command.commands, f"{where}: there is no command {name}"
        command = command.commands[name]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        if word.startswith("-"):
            assert word.partition("=")[0] in options | {"--help"}, f"{where}: no option {word}"
        elif "=" in word and "import-verl" not in words:
            assert is_key(word.partition("=")[0]), f"{where}: no key {word}"


def is_key(name: str) -> bool:
    return re.sub(r"\.\d+(?=\.|$)", ".0", name) in key_names() or name.rpartition(".0")[0] in key_names()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_exist_with_their_options_and_keys(page):
    makefile = (ROOT / "Makefile").read_text()
    for words in command_lines(page):
        where = f"{page.name}: {' '.join(words)}"
        given = megappo_words(words)
        if given is not None:
            check_megappo(given, where)
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), where
        elif words[:2] == ["python", "-m"] and words[2].startswith("megappo"):
            source = (ROOT / words[2].replace(".", "/")).with_suffix(".py").read_text()
            for option in (word for word in words if word.startswith("--")):
                assert f'"{option}"' in source, f"{where}: no option {option}"
        elif words[0] == "pip" and (extras := re.search(r"\[(.+)\]", " ".join(words))):
            assert set(extras[1].split(",")) <= setup_extras(), where


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in OTHER_TOOLS], ids=page_id)
def test_keys_in_the_text_exist(page):
    sections = "trainer|model|actor|critic|reference|rollout|algorithm|rewards|data|sft|reward_model"
    for span in code_spans(page):
        found = re.fullmatch(rf"((?:{sections})\.[a-z0-9_.]+)(?:[:=].*)?", span)
        if found and not found[1].endswith((".py", ".safetensors", ".md")):
            # A column of the rows has the name of a section.
            assert is_key(found[1]) or found[1] == "reward_model.ground_truth", f"{page.name}: no key {span}"


def setup_extras() -> set[str]:
    tree = ast.parse((ROOT / "setup.py").read_text())
    (extras,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "EXTRAS")
    return {key.value for key in extras.keys}


def test_the_readme_names_every_extra():
    section = (ROOT / "README.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in section.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == setup_extras()


# --- metrics -------------------------------------------------------------------------------------------

NOT_LOGGED = {"actor/ratio_min_neg", "val/generations"}  # renamed before logging; a tag of texts
ENDINGS = {"summarize": ("mean", "std", "median", "max", "min"), "add_stats": ("mean", "max", "min")}


def documented_metrics() -> set[str]:
    """Names in the tables of every section "Metrics", `{a,b}` spelled out, placeholders as `X`."""
    names: set[str] = set()
    for page in PAGES:
        section = page.read_text(encoding="utf-8").partition("\n## Metrics\n")[2].partition("\n## ")[0]
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
            for span in re.findall(r"`([^`]+)`", row):
                parts = re.split(r"\{([^}]*)\}", re.sub(r"<\w+>", "X", span))
                choices = [[part] if i % 2 == 0 else part.split(",") for i, part in enumerate(parts)]
                names |= {"".join(choice) for choice in itertools.product(*choices)}
    return names


def metric_sources() -> list[Path]:
    """The modules of the trainer that a run imports, and those that name metrics for it."""
    found: list[Path] = []
    queue = [ROOT / "megappo/trainer/ppo.py", ROOT / "megappo/trainer/sft.py"]
    queue.append(ROOT / "megappo/trainer/reward_model.py")
    while queue:
        file = queue.pop()
        if file not in found:
            found.append(file)
            names = [name for name in imported(file) if name.startswith("megappo.trainer.")]
            files = [(ROOT / name.replace(".", "/")).with_suffix(".py") for name in names]
            queue += [file for file in files if file.exists()]
    others = (
        "engine/losses.py",
        "observe/memory.py",
        "algorithms/correction.py",
        "rewards/signals.py",
        "rewards/dynamic.py",
        "rollout/sglang/engine.py",
    )
    return [*found, *(ROOT / "megappo" / name for name in others)]


def pattern_of(node: ast.AST) -> str | None:
    """A string as written, with `*` for what an f-string fills in; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
    return None


def logged_patterns() -> set[str]:
    """Metric names that the sources build."""
    found: set[str] = set()
    for file in metric_sources():
        tree = ast.parse(file.read_text())
        prefixes: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and (text := pattern_of(node.args[0])):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in ENDINGS:
                    found |= {f"{text}/{ending}" for ending in ENDINGS[name]}
                    prefixes.add(id(node.args[0]))
                elif name == "timer":
                    found.add(f"timing_s/{text}")
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        shape = r"val/\*/[\w*/]+" if file.name == "evaluate.py" else r"[a-z*][\w*]*(/[\w*]+)+"
        for node in ast.walk(tree):
            text = None if id(node) in prefixes | inner else pattern_of(node)
            if text and re.fullmatch(shape, text):
                found.add(text)
    return found - NOT_LOGGED


def test_every_metric_in_the_tables_is_logged():
    patterns = logged_patterns()
    for name in documented_metrics():
        assert any(fnmatchcase(name, pattern) for pattern in patterns), f"nothing logs {name}"


def test_every_logged_metric_is_in_the_tables():
    names = documented_metrics()
    for pattern in logged_patterns():
        assert any(fnmatchcase(name, pattern) for name in names), f"no section Metrics in docs/ explains {pattern}"


# --- experiments ---------------------------------------------------------------------------------------

#: experiment -> ranks it is meant for, and the sizes of its model
QWEN, LLAMA = "Qwen2ForCausalLM", "LlamaForCausalLM"
MODELS = {
    "qwen2.5_0.5b_gsm8k": ((1, 2, 4, 8), QWEN, (24, 896, 14, 2, 4864, 151936, 32768)),
    "qwen2.5_7b_gsm8k": ((8,), QWEN, (28, 3584, 28, 4, 18944, 152064, 32768)),
    "llama3_8b_dapo_style": ((8,), LLAMA, (32, 4096, 32, 8, 14336, 128256, 131072)),
    "llama3_70b": ((32, 64), LLAMA, (80, 8192, 64, 8, 28672, 128256, 131072)),
    "qwen2.5_7b_sglang": ((4,), QWEN, (28, 3584, 28, 4, 18944, 152064, 32768)),
    "offline_preferences": ((1, 2, 4, 8), QWEN, (24, 896, 14, 2, 4864, 151936, 32768)),
    "smollm2_cpu": ((2,), LLAMA, (30, 576, 9, 3, 1536, 49152, 8192)),
}
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_experiments_load(file):
    config, _ = read_config(file)
    if config.sft is not None:
        read_config(file, kind="sft")
    if config.reward_model is not None:
        read_config(file, kind="reward-model")


@pytest.mark.parametrize("name", MODELS)
def test_experiments_fit_their_models_and_ranks(name, tmp_path):
    worlds, architecture, sizes = MODELS[name]
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [architecture], **dict(zip(SIZES, sizes, strict=True))})
    )
    for file in ("model.safetensors", "tokenizer.json", "prompts.parquet"):
        (tmp_path / file).touch()
    prompts = f"[{tmp_path / 'prompts.parquet'}]"
    file = ROOT / "yaml_configs" / f"{name}.yaml"
    changes = [f"model.path={tmp_path}", f"data.train_files={prompts}"]
    changes += [f"data.val_files={prompts}"] if "val_files" in file.read_text() else []
    changes += [f"rollout.sglang.launch=[{sys.executable}]"] if "engine: sglang" in file.read_text() else []
    config, sources = read_config(file, changes)
    for world in worlds:
        sources.raise_if_any(check_config(config, world_size=world))


# --- the map of the code -------------------------------------------------------------------------------


def test_imports_point_down_the_table_in_the_readme():
    rows = re.findall(r"^\| `((?:megappo|megappo_cli|checkpoints_tools)/[a-z_/]*)` \|", prose(PAGES[0]), re.MULTILINE)
    order = [row.rstrip("/").replace("/", ".") for row in rows]
    folders = [p.parent for p in (ROOT / "megappo").glob("*/__init__.py")]
    assert {f"megappo.{folder.name}" for folder in folders} <= set(order)
    for place, package in enumerate(order):
        above = order[:place]
        for file in (ROOT / package.replace(".", "/")).rglob("*.py"):
            for module in imported(file):
                upward = any(module == name or module.startswith(name + ".") for name in above)
                allowed = package == "megappo.engine" and module.startswith("megappo.checkpoint.hf")
                assert allowed or not upward, f"{file} imports {module} from above"


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found
