"""The package as a stranger gets it: built, checked, installed into environments of its own, used from an empty folder.

    python tests/install/check_install.py --dependencies pinned       (make test-install; a few minutes a cell)
    python tests/install/check_install.py --python 3.12 --dependencies lowest
    python tests/install/check_install.py                             (make test-matrix)

Runs on the standard library alone. The sdist is built and checked, and the wheel is made of it. Then every cell of a
matrix is tried: each Python of 3.11 to 3.13 that is found, with the versions of constraints.txt ("pinned"), with the
lowest that pyproject.toml allows, and with the newest. The first cell tries every extra and the demo, the others the
core, trees and packed models. torch is installed once a cell; each extra of the first borrows from that environment.
An environment is removed as soon as it has been tried, and nothing is kept in pip's cache: the lowest and the newest
torch may bring gigabytes of CUDA libraries, and a cell that the disk has no room for is refused before it begins.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
WORK = BUILD / "install"
PYTHONS = ("3.11", "3.12", "3.13")
DEPENDENCIES = ("pinned", "lowest", "newest")
NEEDED_GB = {"pinned": 5, "lowest": 16, "newest": 16}  # while a cell is installed; torch from a registry brings CUDA
NOT_SHIPPED = {".nbc", ".nbi", ".pyc"}
MODEL = "import torch, bitplan; bitplan.save_packed(torch.nn.Linear(256, 256), 'model.safetensors')"
TREES = """
import numpy as np
from bitplan.trees import BoostedTreesClassifier
x = np.random.default_rng(0).standard_normal((2000, 6))
model = BoostedTreesClassifier(n_estimators=5, gradient_precision="i16").fit(x, x[:, 0] > 0)
assert (model.predict(x) == (x[:, 0] > 0)).mean() > 0.9
"""
PACKED = """
import transformers, bitplan, bitplan.transformers
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained("llama")
bitplan.quantize_file("llama", "packed", "mxfp4")
assert bitplan.load_packed("packed")[1].packed_tensors
transformers.AutoModelForCausalLM.from_pretrained("packed")
"""
WITHOUT_TREES = "demo: bitplan.trees needs scikit-learn, which is not installed: pip install 'bitplan[trees]'\n"
IMPORT_ALL = """
import importlib, importlib.metadata as metadata, importlib.util, re, sys
plain = lambda name: re.sub("[-_.]+", "-", name).lower()
asked = [one for one in metadata.requires("bitplan") if re.search(rf"extra == .{sys.argv[1]}.", one)]
wanted = {plain(re.match("[A-Za-z0-9._-]+", one)[0]) for one in asked}
modules = {module: set(map(plain, names)) for module, names in metadata.packages_distributions().items()}
for name in sorted(wanted):
    own = [module for module, names in modules.items() if name in names and module.isidentifier()]
    own = [module for module in own if importlib.util.find_spec(module)]  # some list their tests, and ship none
    assert own, f"{name} is not installed"
    for module in own:
        importlib.import_module(module)
print("imported", *sorted(wanted))
"""


def main() -> None:
    options = parse_options()
    for leftover in (
        WORK,
        BUILD / "lib",
        *BUILD.glob("bdist.*"),
    ):  # setuptools would pack what is left of former builds
        shutil.rmtree(leftover, ignore_errors=True)
    sdist, wheel = build()
    check_contents(wheel)
    check_sdist(sdist)
    pythons = find_pythons(options.python)
    cells = [(python, dependencies) for python in pythons for dependencies in options.dependencies]
    expect(bool(cells), f"no Python of {', '.join(options.python)} was found")
    for number, (version, dependencies) in enumerate(cells):
        say(f"Python {version}, {dependencies} dependencies")
        check_room(dependencies)
        try_cell(pythons[version], f"{version}-{dependencies}", wheel, dependencies, whole=number == 0)
        shutil.rmtree(WORK / f"{version}-{dependencies}")
    shutil.rmtree(WORK)
    say(f"{len(cells)} of {len(PYTHONS) * len(DEPENDENCIES)} cells work: {', '.join('-'.join(cell) for cell in cells)}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build, check and install the package in fresh environments.")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="one Python; several times for several")
    parser.add_argument("--dependencies", action="append", choices=DEPENDENCIES, help="one set of versions")
    options = parser.parse_args()
    options.python = options.python or list(PYTHONS)
    options.dependencies = options.dependencies or list(DEPENDENCIES)
    return options


def find_pythons(versions: list[str]) -> dict[str, str]:
    """Interpreters by version: on the path, or pyenv's; one that is not there is said."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    interpreters = {}
    for version in versions:
        candidates = [
            sys.executable,
            shutil.which(f"python{version}"),
            *map(str, pyenv.glob(f"{version}.*/bin/python")),
        ]
        working = [python for python in candidates if python and version_of(python) == version]
        if working:
            interpreters[version] = working[0]
        else:
            say(f"Python {version} was not found: its cells are left out")
    return interpreters


def check_room(dependencies: str) -> None:
    free, needed = shutil.disk_usage(WORK).free / 1e9, NEEDED_GB[dependencies]
    hint = f"free some of {WORK}'s disk, or try fewer cells with --dependencies pinned"
    expect(free >= needed, f"a cell with {dependencies} dependencies needs {needed} GB, {free:.1f} are free: {hint}")


def version_of(python: str) -> str:
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return answer.stdout.strip()


def try_cell(python: str, name: str, wheel: Path, dependencies: str, *, whole: bool) -> None:
    """One Python with one set of dependencies; the whole of it tries every extra and the demo."""
    constraints = constraints_for(wheel, dependencies)
    core = make_environment(name, python)
    if not whole:
        install(core, f"{wheel}[trees,models]", constraints)
        use_verbs(core)
        run([core, "-c", TREES])
        run([core, "-c", PACKED])
        return
    install(core, str(wheel), constraints)
    use_core(core)
    for extra in extras_of(wheel):
        env = make_environment(f"{name}-{extra}", python, borrow_from=core)
        install(core, f"bitplan[{extra}]", constraints, into=env)
        say(f"import what bitplan[{extra}] brings")
        run([env, "-c", IMPORT_ALL, extra])
        if extra == "trees":
            run_demo(env)
        shutil.rmtree(WORK / f"{name}-{extra}")


def constraints_for(wheel: Path, dependencies: str) -> Path | None:
    """The file of versions that pip keeps to; None for the newest."""
    if dependencies == "newest":
        return None
    if dependencies == "pinned":
        return ROOT / "constraints.txt"
    lowest = {}
    for requirement in metadata_of(wheel, "Requires-Dist"):
        match = re.match(r"([\w.-]+)(?:\[[\w,]+\])?[^;]*>=([\w.]+)", requirement)
        if match and "extra == 'dev'" not in requirement.replace('"', "'"):
            lowest[match[1]] = match[2]
    file = WORK / "lowest.txt"
    file.write_text("".join(f"{name}=={version}\n" for name, version in sorted(lowest.items())))
    return file


def build() -> tuple[Path, Path]:
    """The sdist, and the wheel that is made of it; both pass twine's check."""
    say("build the sdist and the wheel, and check them with twine")
    tools = make_environment("tools", sys.executable)
    run([tools, "-m", "pip", "install", "--quiet", "build", "twine"])
    run([tools, "-m", "build", "--outdir", str(WORK / "dist"), str(ROOT)])
    (sdist,), (wheel,) = (WORK / "dist").glob("bitplan-*.tar.gz"), (WORK / "dist").glob("bitplan-*.whl")
    run([tools, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
    return sdist, wheel


def check_sdist(sdist: Path) -> None:
    """The package and what describes it."""
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "bitplan").rglob("*.py")}
    missing = (package | {"README.md", "LICENSE", "pyproject.toml", "CHANGELOG.md"}) - names
    expect(not missing, f"the sdist lacks {', '.join(sorted(missing))}")


def check_contents(wheel: Path) -> None:
    """Every file of the package, and the license."""
    packed = set(zipfile.ZipFile(wheel).namelist())
    own = {path for path in (ROOT / "bitplan").rglob("*") if path.is_file() and path.suffix not in NOT_SHIPPED}
    missing = {path.relative_to(ROOT).as_posix() for path in own} - packed
    expect(not missing, f"the wheel lacks {', '.join(sorted(missing))}")
    expect(any(name.endswith("licenses/LICENSE") for name in packed), "the wheel lacks the license")
    strays = {name for name in packed if not name.startswith(("bitplan/", "bitplan-"))}
    expect(not strays, f"the wheel holds what is not the package: {', '.join(sorted(strays))}")


def extras_of(wheel: Path) -> list[str]:
    return metadata_of(wheel, "Provides-Extra")


def metadata_of(wheel: Path, key: str) -> list[str]:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        lines = packed.read(name).decode().splitlines()
    return [line.partition(": ")[2] for line in lines if line.startswith(f"{key}: ")]


def make_environment(name: str, python: str, borrow_from: str | None = None) -> str:
    """The Python of a new environment; one that borrows sees what the other has installed."""
    folder = WORK / name
    run([python, "-m", "venv", *(["--without-pip"] if borrow_from else []), str(folder)])
    environment = str(folder / "bin" / "python")
    if borrow_from:
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages, borrowed = (run([one, "-c", code]).stdout.strip() for one in (environment, borrow_from))
        (Path(packages) / "borrowed.pth").write_text(borrowed + "\n")
    return environment


def install(pip_of: str, what: str, constraints: Path | None, into: str | None = None) -> None:
    say(f"install {Path(what).name}")
    there = ["--python", into] if into else []
    kept_to = ["-c", str(constraints)] if constraints else []
    run(
        [
            pip_of,
            "-m",
            "pip",
            *there,
            "install",
            "--quiet",
            "--no-cache-dir",
            "--disable-pip-version-check",
            *kept_to,
            what,
        ]
    )


def use_verbs(python: str) -> None:
    """A few verbs and a file."""
    say("use the command")
    command = str(Path(python).with_name("bitplan"))
    shutil.rmtree(WORK / "empty", ignore_errors=True)
    run([command, "doctor", "--no-measure"])
    run([command, "inspect"])
    run([python, "-c", MODEL])
    run([command, "quantize", "model.safetensors", "small.safetensors", "--format", "int8_row"])
    run([command, "compare", "model.safetensors", "small.safetensors"])


def use_core(python: str) -> None:
    """The verbs, and the line that names the extra."""
    use_verbs(python)
    take_demo()
    refused = run([python, "-m", "examples.demo"], code=2)
    expect(refused.stderr == WITHOUT_TREES, f"the demo without scikit-learn said: {refused.stderr}")
    expect(not (WORK / "empty" / "demo-out").exists(), "the demo worked before it said what is missing")


def take_demo() -> None:
    """Copy the script of the demo, which is no part of the package, beside the installed one."""
    shutil.copytree(ROOT / "examples" / "demo", WORK / "empty" / "examples" / "demo", dirs_exist_ok=True)


def run_demo(python: str) -> None:
    say("run the demo")
    take_demo()
    run([python, "-m", "examples.demo", "--fast"])
    report = WORK / "empty" / "demo-out" / "report.html"
    expect(report.is_file() and report.read_text().rstrip().endswith("</html>"), "the demo wrote no whole report.html")


def run(command: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    """In an empty folder, so that nothing of the clone is imported."""
    folder = WORK / "empty"
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    expect(done.returncode == code, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def expect(holds: bool, message: str) -> None:
    if not holds:
        sys.exit(message)


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


if __name__ == "__main__":
    main()
