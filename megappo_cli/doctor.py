"""`megappo doctor`: what is here, what training will use instead of what is not, and what to install."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

from megappo_cli.launcher import usable_cores

MEGATRON = "0.16.1"  # the version that setup.py pins and that megappo/parallel/cpu_patches.py is checked against

#: distribution -> module, for what training cannot do without, torch and megatron-core aside
REQUIRED = {
    "transformers": "transformers",
    "safetensors": "safetensors",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
    "typer": "typer",
    "rich": "rich",
    "pyarrow": "pyarrow",
    "tensorboard": "tensorboard",
    "numpy": "numpy",
    "jinja2": "jinja2",
    "psutil": "psutil",
    "packaging": "packaging",
}

#: (distribution, module, what happens without it, how to get it)
OPTIONAL = (
    ("sglang", "sglang", "the embedded engine generates, or servers elsewhere", "pip install 'megappo[sglang]'"),
    ("ray", "ray", "torchrun or --nproc starts the ranks", "pip install 'megappo[ray]'"),
    ("wandb", "wandb", "console, tensorboard and jsonl loggers", "pip install 'megappo[wandb]'"),
    ("mlflow", "mlflow", "console, tensorboard and jsonl loggers", "pip install 'megappo[mlflow]'"),
    ("math-verify", "math_verify", "rule rewards without symbolic comparison", "pip install 'megappo[math]'"),
    ("reasoning-gym", "reasoning_gym", "no generated reasoning tasks", "pip install 'megappo[reasoning]'"),
)


@dataclass
class Finding:
    """One line of the report. `problem` is None where all is well; `required` problems prevent training."""

    name: str
    found: str | None  # version or description; None: not found
    required: bool = False
    problem: str | None = None
    instead: str | None = None
    install: str | None = None


@dataclass
class Report:
    """All findings, and what training will use."""

    findings: list[Finding] = field(default_factory=list)
    uses: dict[str, str] = field(default_factory=dict)

    @property
    def can_train(self) -> bool:
        return not any(f.required and f.problem for f in self.findings)


def run_doctor(as_json: bool) -> int:
    """Print the report; 0 if training can run, else 1."""
    report = examine()
    print(json.dumps(_as_dict(report), indent=2) if as_json else render(report))
    return 0 if report.can_train else 1


def examine() -> Report:
    """Look at this machine. Never raises: a package that breaks on import is a finding."""
    report = Report()
    add = report.findings.append
    recent = sys.version_info >= (3, 11)
    add(Finding("python", platform.python_version(), True, None if recent else "3.11 or newer is needed"))
    torch, finding = _torch()
    add(finding)
    devices = _cuda_devices(torch)
    instead = None if devices else "the CPU (gloo, torch layers): right, but slow"
    add(Finding("CUDA devices", ", ".join(devices) or None, instead=instead))
    engine = _transformer_engine(bool(devices))
    add(engine)
    add(_megatron(torch is not None, bool(devices), engine))
    apex = _apex(bool(devices))
    add(apex)
    for name, module in REQUIRED.items():
        found = _version(name, module)
        add(Finding(name, found, True, None if found else "missing", install=f"pip install {name}"))
    for name, module, without, install in OPTIONAL:
        found = _version(name, module)
        add(Finding(name, found, instead=None if found else without, install=None if found else install))
    report.uses = _uses(torch, devices, engine, apex)
    return report


def _uses(torch: Any, devices: list[str], engine: Finding, apex: Finding) -> dict[str, str]:
    fused = bool(devices) and engine.found is not None and not engine.problem
    if fused:
        optimizer = "Transformer Engine FusedAdam"
    elif devices and apex.found and not apex.problem:
        optimizer = "Apex FusedAdam"
    else:
        optimizer = "torch AdamW"
    return {
        "layers": "Transformer Engine" if fused else "torch (megatron-core's local layer spec)",
        "optimizer": optimizer,
        "distributed backend": "nccl" if devices else "gloo",
        "CPU": f"{usable_cores()} cores, {torch.get_num_threads() if torch else '?'} torch threads",
    }


def _version(name: str, module: str) -> str | None:
    """Installed version, found without importing anything. "?" for a module without package metadata."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return "?" if importlib.util.find_spec(module) is not None else None
    except (ImportError, ValueError):
        return None


def _import(module: str) -> tuple[Any, str | None]:
    """Import quietly: (module, None) or (None, what went wrong); native packages raise anything."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module), None
    except Exception as err:
        return None, _first_line(err)


def _first_line(err: Exception) -> str:
    return f"{type(err).__name__}: {str(err).strip()}".splitlines()[0]


def _torch() -> tuple[Any, Finding]:
    version = _version("torch", "torch")
    torch, broken = _import("torch") if version else (None, "missing")
    if torch is not None:
        version = torch.__version__
    return torch, Finding("torch", version, True, broken, install="pip install 'torch>=2.6'" if broken else None)


def _cuda_devices(torch: Any) -> list[str]:
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _transformer_engine(cuda: bool) -> Finding:
    version = _version("transformer-engine", "transformer_engine")
    if version is None:
        instead = "torch layers and optimizer"
        return Finding(
            "transformer-engine",
            None,
            instead=instead,
            install="pip install 'megappo[gpu]'" if cuda else None,
        )
    if not cuda:
        # Its import raises RuntimeError without a device, and megatron-core tries it: then nothing works.
        return Finding(
            "transformer-engine",
            version,
            True,
            "breaks the import of megatron-core on a machine without a CUDA device",
            install="pip uninstall transformer-engine transformer-engine-torch",
        )
    _, broken = _import("transformer_engine.pytorch")
    if broken:
        return Finding(
            "transformer-engine",
            version,
            True,
            f"does not import ({broken}), and megatron-core fails with it",
            install="pip install --force-reinstall 'transformer-engine[pytorch]', or uninstall it",
        )
    return Finding("transformer-engine", version)


def _megatron(has_torch: bool, cuda: bool, engine: Finding) -> Finding:
    pin = f"pip install megatron-core=={MEGATRON}"
    version = _version("megatron-core", "megatron.core")
    if version is None:
        return Finding("megatron-core", None, True, "missing", install=pin)
    if version != MEGATRON:
        problem = f"version {MEGATRON} is needed: the CPU patches are checked against it"
        return Finding("megatron-core", version, True, problem, install=pin)
    if not has_torch or engine.problem:
        return Finding("megatron-core", version, True)  # the finding above says why it cannot be imported
    backend, broken = _import("megappo.parallel.backend")
    if not broken:
        try:
            backend.install()  # the door through which training imports it
        except Exception as err:
            broken = _first_line(err)
    return Finding("megatron-core", version, True, f"does not import ({broken})" if broken else None)


def _apex(cuda: bool) -> Finding:
    version = _version("apex", "apex")
    if version is None:
        return Finding("apex", None, instead="another optimizer (below)")
    _, broken = _import("apex.optimizers") if cuda else (None, None)
    return Finding("apex", version, problem=f"does not import ({broken})" if broken else None)


def _as_dict(report: Report) -> dict[str, Any]:
    return {
        "can_train": report.can_train,
        "uses": report.uses,
        "findings": [asdict(finding) for finding in report.findings],
    }


def render(report: Report) -> str:
    """The report as aligned text."""
    lines = []
    for item in report.findings:
        mark = "ok" if item.found and not item.problem else "BAD" if item.problem else "-"
        text = item.found or "not found"
        if item.problem and item.problem != "missing":
            text += f": {item.problem}"
        if not item.found and item.instead:
            text += f"; instead: {item.instead}"
        lines.append(f"{mark:<4}{item.name:<20}{text}")
    lines += ["", "training will use"]
    lines += [f"    {name:<20}{value}" for name, value in report.uses.items()]
    todo = [item for item in report.findings if item.problem and item.install]
    optional = [item for item in report.findings if not item.problem and not item.found and item.install]
    if todo:
        lines += ["", "to be able to train", *(f"    {item.install}" for item in todo)]
    if optional:
        lines += ["", "optional", *(f"    {item.install}" for item in optional)]
    lines += ["", "training can run here" if report.can_train else "training CANNOT run here"]
    return "\n".join(lines)
