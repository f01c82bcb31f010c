"""Every module has a test: a file of its name, a test that imports it, or the neighbour named here."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "bitplan").rglob("*.py"))
    if path.name != "__init__.py"
}
# The test that fails when the module is wrong; modules that a test imports, or that have a file of their name, are not
# here.
NEIGHBOURS = {
    "bitplan.__main__": "cli/test_cli.py",
    "bitplan.base.inductor_calls": "packed/test_compiled_calls.py",
    "bitplan.base.loops.atomics": "base/loops/test_helper_threads.py",
    "bitplan.base.loops.vectors": "formats/test_cpu_codec.py",
    "bitplan.cli.options": "cli/test_option_names.py",
    "bitplan.cli.verbs.export": "cli/test_journey.py",
    "bitplan.cli.verbs.files": "cli/test_outputs.py",
    "bitplan.cli.verbs.gpt_oss": "cli/verbs/test_convert_verbs.py",
    "bitplan.cli.verbs.quality": "cli/verbs/test_perplexity_verb.py",
    "bitplan.cli.verbs.run_model": "cli/verbs/test_run_verbs.py",
    "bitplan.files.engines.folder": "files/engines/test_hf.py",
    "bitplan.files.models.comparable_tensors": "files/test_compare_files.py",
    "bitplan.files.schemes.awq": "files/test_schemes.py",
    "bitplan.files.schemes.bitsandbytes": "files/test_schemes.py",
    "bitplan.files.schemes.floats": "files/test_schemes.py",
    "bitplan.files.schemes.gptq": "files/test_schemes.py",
    "bitplan.files.schemes.integers": "files/test_schemes.py",
    "bitplan.files.tensor_recipes": "files/test_quantize.py",
    "bitplan.formats.encoded": "formats/test_codec.py",
    "bitplan.formats.gguf.cpu_block_search": "formats/gguf/test_cpu_search.py",
    "bitplan.packed.checkpoints.quantizer": "packed/checkpoints/test_packed_folders.py",
    "bitplan.packed.checkpoints.save": "packed/checkpoints/test_packed_folders.py",
    "bitplan.packed.products.decode_words": "packed/products/test_triton_matmul.py",
    "bitplan.plan.structure.graph": "plan/structure/test_describe.py",
    "bitplan.plan.structure.parameters": "plan/structure/test_describe.py",
    "bitplan.plan.structure.recognise": "plan/structure/test_describe.py",
    "bitplan.report.section": "report/test_page.py",
    "bitplan.report.section_of_fit": "cli/verbs/test_fit_verb.py",
    "bitplan.report.section_of_plan": "report/test_page.py",
    "bitplan.report.section_of_quality": "report/test_page.py",
    "bitplan.report.section_of_search": "report/test_page.py",
    "bitplan.report.section_of_speed": "report/test_page.py",
    "bitplan.report.section_of_streaming": "report/test_page.py",
    "bitplan.rounding.round_vectors": "rounding/test_weights.py",
    "bitplan.searching.kv_evidence": "searching/test_fit.py",
    "bitplan.streaming.routed_experts": "streaming/test_experts.py",
    "bitplan.streaming.saved_tensors": "streaming/test_offload.py",
    "bitplan.streaming.selective.precision_units": "streaming/selective/test_calibration.py",
    "bitplan.streaming.selective.triton_gradient_statistics": "streaming/selective/test_grad_stats.py",
    "bitplan.streaming.transfer.activation_offload": "streaming/test_offload.py",
    "bitplan.streaming.transfer.slot_ring": "streaming/test_schedule.py",
    "bitplan.streaming.weight_loader": "streaming/test_weights.py",
    "bitplan.trees.cuda.grower": "trees/cuda/test_cuda.py",
    "bitplan.trees.dask.on_worker": "trees/dask/test_dask.py",
    "bitplan.trees.fitted": "trees/test_model_file.py",
    "bitplan.trees.loops.compiling": "trees/loops/test_nodes.py",
    "bitplan.trees.loops.grow_tree": "trees/test_grow.py",
    "bitplan.trees.save": "trees/test_model_file.py",
    "bitplan.trees.scikit": "trees/test_estimators.py",
}


def modules_with_a_test() -> set[str]:
    """Modules that a test imports or names, and those that a test file is named after."""
    known = set()
    for path, text in TESTS.items():
        for node in ast.walk(ast.parse(text)) if path != Path(__file__) else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                known |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                known |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # what is replaced within a test
                known |= {node.value, node.value.rpartition(".")[0]}
    files = {path.stem.removeprefix("test_") for path in TESTS}
    return {name for name in MODULES if name in known or name.rpartition(".")[2] in files}


def test_every_module_has_a_test_or_a_named_neighbour() -> None:
    assert {*MODULES} - modules_with_a_test() == {*NEIGHBOURS}
    assert {ROOT / "tests" / file for file in NEIGHBOURS.values()} <= {*TESTS}
