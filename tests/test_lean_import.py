"""Starting is quick: torch, numpy, Triton, numba and gguf are loaded when a name or a verb needs them.

Modules are counted and not seconds, because seconds differ between machines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from bitplan.files.safetensors import write_safetensors
from bitplan.plan.manifest import SHIPPED

HEAVY = {"torch", "numpy", "triton", "numba", "gguf", "matplotlib", "sklearn", "transformers"}


def modules_after(statement: str, **environment: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return set(done.stderr.splitlines()[-1].split())


def test_a_name_loads_what_it_needs_and_starts_no_gpu() -> None:
    """Nor does a module of kernels load a compiler, nor that of the callbacks a trainer."""
    code = "from bitplan import encode; import bitplan.formats.dispatch, sys, torch\n"
    code += "assert not torch.cuda.is_initialized()\n"
    code += f"assert not set(sys.modules) & {HEAVY - {'torch', 'numpy'}}\n"
    code += "import bitplan.streaming.selective.trainer_callbacks"
    assert not modules_after(code) & {"transformers", "lightning", "tensorboard", "triton"}


def test_trees_are_fitted_without_torch_pandas_and_statistics() -> None:
    """scikit-learn imports the last two and does not use them; whoever does gets them."""
    code = f"""
import sys
import bitplan.trees
assert not set(sys.modules) & {HEAVY | {"scipy", "pandas"}}
import numpy as np
from bitplan.trees import BoostedTreesRegressor
x = np.random.default_rng(0).normal(size=(500, 3))
model = BoostedTreesRegressor(n_estimators=2)
model.fit(x, x[:, 0]).predict(x)
assert not set(sys.modules) & {{"pandas", "scipy.stats._stats_py", "scipy.special._ufuncs"}}
import pandas
import scipy.stats
assert scipy.stats.norm.cdf(0) == 0.5
assert list(model.fit(pandas.DataFrame(x, columns=["a", "b", "c"]), x[:, 0]).feature_names_in_) == ["a", "b", "c"]
"""
    assert not modules_after(code) & {"torch", "triton", "transformers", "gguf"}


def test_completion_offers_names_and_loads_no_heavy_library() -> None:
    offered = {
        ("quantize", "a", "b", "--format", "mxf"): {"mxfp4", "mxfp4_gguf", "mxfp8_e4m3"},
        ("perplexity", "a", "--format", "int8_"): {"int8_row", "int8_g64", "int8_g128"},
        ("check", "ll"): {"llama"},
        ("manifest", "show", ""): set(SHIPPED),
        ("inspec",): {"inspect"},
    }
    code = (
        "import os, sys\nfrom bitplan.cli import run\n"
        f"for words in {list(offered)}:\n"
        "    os.environ |= {'COMP_WORDS': ' '.join(('bitplan', *words)), 'COMP_CWORD': str(len(words))}\n"
        "    try: run([])\n    except SystemExit: print(end=';', flush=True)\n"
        f"assert not set(sys.modules) & {HEAVY | {'pydantic'}}, set(sys.modules) & {HEAVY | {'pydantic'}}"
    )
    environment = os.environ | {"_BITPLAN_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert [set(names.split()) for names in done.stdout.split(";")] == [*offered.values(), set()]


def test_import_plans_help_and_simple_refusals_load_no_heavy_library_and_headers_are_read_without_torch(
    tmp_path: Path,
) -> None:
    """One after the other in one process: each start takes half a second."""
    with write_safetensors(tmp_path / "llama.safetensors", [("model.norm.weight", torch.bfloat16, (8,))]) as writer:
        writer.write("model.norm.weight", torch.zeros(8, dtype=torch.bfloat16))
    for name in ("a", "b"):
        with write_safetensors(tmp_path / f"{name}.safetensors", [("w", torch.float32, (2, 2))]) as writer:
            writer.write("w", torch.ones(2, 2))
    (tmp_path / "text.txt").write_text("some text")
    refused = [
        ["quantize", "missing.safetensors", "out.safetensors", "-f", "int8_row"],
        ["quantize", "a.safetensors", "out.safetensors", "-f", "int9"],
        ["quantize", "a.safetensors", "b.safetensors", "-f", "int8_row"],
        ["quantize", "a.safetensors", "out.safetensors", "-f", "int8_row", "--keep", "nothing"],
        ["compare", "missing.safetensors", "a.safetensors"],
        ["compare", "a.safetensors", "missing.safetensors"],
        ["compare", "--scales", "a.safetensors", "missing.safetensors"],
        ["gpt-oss", "convert", "missing", "out", "--to", "hf"],
        ["inspect", "a.safetensors", "--tensor", "nothing"],
        ["generate", "missing", "text"],
        ["bench", "."],
        ["check", "a.safetensors"],
        ["judge", "missing", "--text", "text.txt"],
        ["judge", "a.safetensors", "--text", "text.txt"],
        ["judge", "a.safetensors", "--text", "missing.txt"],
        ["judge", "a.safetensors", "--text", "text.txt", "-f", "int9"],
    ]
    read = [
        ["inspect", "llama.safetensors"],
        ["check", "llama", "llama.safetensors"],
        ["plan", "llama", "llama.safetensors"],
        ["manifest", "show", "llama"],
        ["manifest", "schema"],
        ["inspect"],
        ["doctor", "--quick"],
    ]
    helped = [["--version"], ["--help"], ["quantize", "--help"], ["manifest", "show", "--help"]]
    code = f"""
import os, sys
os.chdir({str(tmp_path)!r})

def check(others=()):
    assert not set(sys.modules) & {{*{HEAVY}, *others}}, set(sys.modules) & {{*{HEAVY}, *others}}

import bitplan
check(["typer", "rich", "pydantic"])
assert len([name for name in sys.modules if name.startswith("bitplan")]) <= 9  # base, names and old parts
import bitplan.plan
for name in bitplan.plan.__all__:
    getattr(bitplan.plan, name)
check()
from bitplan.cli import run
assert [run(each) for each in {helped}] == [0] * {len(helped)}
check(["pydantic"])
assert [run(each) for each in {refused}] == [2] * {len(refused)}
check()
for each in {read}:
    assert run(each) in (0, 1), each
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
