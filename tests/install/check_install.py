"""The wheel as a stranger gets it: built, installed into an environment of its own, and used from an empty folder.

    python tests/install/check_install.py       (make test-install; a few minutes)

Runs on the standard library alone, with the Python that will be installed into. torch is installed once, with what
bitplan itself needs; each extra gets an environment that borrows from that one, and installs only its own libraries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
WORK = BUILD / "install"
NOT_SHIPPED = {".nbc", ".nbi", ".pyc"}
MODEL = "import torch, bitplan; bitplan.save_packed(torch.nn.Linear(256, 256), 'model.safetensors')"
WITHOUT_TREES = "demo: bitplan.trees needs scikit-learn, which is not installed: pip install 'bitplan[trees]'\n"
IMPORT_ALL = """
import importlib, importlib.metadata as metadata, importlib.util, re, sys
plain = lambda name: re.sub("[-_.]+", "-", name).lower()
asked = [each for each in metadata.requires("bitplan") if re.search(rf"extra == .{sys.argv[1]}.", each)]
wanted = {plain(re.match("[A-Za-z0-9._-]+", each)[0]) for each in asked}
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
    shutil.rmtree(BUILD, ignore_errors=True)  # setuptools would pack what is left of former builds
    wheel = build_wheel()
    check_contents(wheel)
    core = make_environment("core")
    install(core, str(wheel))
    use_core(core)
    for extra in extras_of(wheel):
        env = make_environment(extra, borrow_from=core)
        install(core, f"bitplan[{extra}]", into=env)
        say(f"import what bitplan[{extra}] brings")
        run([env, "-c", IMPORT_ALL, extra])
        if extra == "trees":
            run_demo(env)
    shutil.rmtree(WORK)
    say("the wheel and every extra work")


def build_wheel() -> Path:
    say("build the wheel")
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(WORK / "dist"), str(ROOT)])
    (wheel,) = (WORK / "dist").glob("bitplan-*.whl")
    return wheel


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
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        lines = packed.read(name).decode().splitlines()
    return [line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")]


def make_environment(name: str, borrow_from: str | None = None) -> str:
    """The Python of a new environment; one that borrows sees what the other has installed."""
    folder = WORK / name
    run([sys.executable, "-m", "venv", *(["--without-pip"] if borrow_from else []), str(folder)])
    python = str(folder / "bin" / "python")
    if borrow_from:
        place = "import sysconfig; print(sysconfig.get_path('purelib'))"
        own, other = (run([each, "-c", place]).stdout.strip() for each in (python, borrow_from))
        (Path(own) / "borrowed.pth").write_text(other + "\n")
    return python


def install(pip_of: str, what: str, into: str | None = None) -> None:
    say(f"install {Path(what).name}")
    there = ["--python", into] if into else []
    run([pip_of, "-m", "pip", *there, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), what])


def use_core(python: str) -> None:
    """A few verbs, a file, and the line that names the extra."""
    say("use the command without extras")
    command = str(Path(python).with_name("bitplan"))
    run([command, "doctor", "--no-measure"])
    run([command, "inspect"])
    run([python, "-c", MODEL])
    run([command, "quantize", "model.safetensors", "small.safetensors", "--format", "int8_row"])
    run([command, "compare", "model.safetensors", "small.safetensors"])
    began = time.monotonic()
    take_demo()
    refused = run([python, "-m", "examples.demo"], code=2)
    expect(refused.stderr == WITHOUT_TREES, f"the demo without scikit-learn said: {refused.stderr}")
    expect(time.monotonic() - began < 60, "the demo worked before it said what is missing")


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
