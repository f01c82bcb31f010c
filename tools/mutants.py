"""Does the suite notice when the code is wrong? A fixed sample of small faults, each put in and tested for.

    python tools/mutants.py --coverage .coverage --output mutants.json
    python tools/mutants.py --coverage .coverage --again tools/mutants_x86.json --jobs 11

`--coverage` is the data of a run with `--cov=bitplan --cov-context=test`, and says which tests reach which line. Each
mutant changes one place of one such line: an operator of a comparison, `and`, `+`, a whole number, a removed `not`, a
`return` without its value, a `raise` that does nothing. Its tests run in a forked process, the module's own first,
until one fails that passes without it. "broken" are those whose tests could not be run: they count for nothing. A fault
that no test of its line notices has survived: look at it, and write the test that it lacks,
or list it in EQUIVALENT with the reason why no test can.

Another line of code is another sample. `--again` tries the faults of earlier outputs, by path and source text, under
their old numbers: a fault whose text is in its file no more is "gone".
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import json
import linecache
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PARTS = ("formats", "plan", "store", "trees", "runtime")
SWAPPED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
# Mutants that no test can kill, by "path source -> mutated source", and why.
EQUIVALENT = {
    "bitplan/plan/manifest.py values = dict(zip(_letters(ours), numbers, strict=True))"
    " -> values = dict(zip(_letters(ours), numbers, strict=False))": "the keys are equal, so both are as long",
    "bitplan/fp8/bench/session.py step = next(each for each in range(max(1, round(experts * 0.618)), 2 * experts + 1) if math.gcd(each, experts) == 1) -> step = next(each for each in range(max(2, round(experts * 0.618)), 2 * experts + 1) if math.gcd(each, experts) == 1)": "any step that shares no factor with the number of experts visits all of them, and both begin with the same one or an equal one modulo it",  # noqa: E501
    "bitplan/fp8/policy/choice.py slopes = [(after - before) / step for (before, after), step in zip(pairwise(ys), steps, strict=True)] -> slopes = [(after - before) / step for (before, after), step in zip(pairwise(ys), steps, strict=False)]": "pairs of neighbours and steps are made from the same list, so both are as long",  # noqa: E501
    "bitplan/streaming/weight_loader.py for name, layout in zip(self.names, layouts, strict=True): -> for name, layout in zip(self.names, layouts, strict=False):": "names and layouts are made from the same list, so both are as long",  # noqa: E501
    "bitplan/streaming/weight_loader.py self._serial += 1 -> self._serial += 2": "serial numbers are only compared for being equal",  # noqa: E501
    "bitplan/fp8/layers/linear.py cast = cast_layouts(layer.weight.detach(), recipe, eps=layer.recipe.eps.weight, is_weight=True, cols=False).rows -> cast = cast_layouts(layer.weight.detach(), recipe, eps=layer.recipe.eps.weight, is_weight=True, cols=True).rows": "the other layout is cast too and dropped: slower, the same result",  # noqa: E501
    "bitplan/files/models/weight_store.py span = 1 + sum((size - 1) * stride for size, stride in zip(master.shape, master.stride(), strict=True)) -> span = 1 + sum((size - 1) * stride for size, stride in zip(master.shape, master.stride(), strict=False))": "a tensor's shape and strides are as long",  # noqa: E501
    "bitplan/streaming/transfer/slot_ring.py self._turn = 0 -> self._turn = 1": "the ring's first turn may begin at any slot",  # noqa: E501
    "bitplan/trees/thread_workspace.py np.empty((size, 4, BINS), np.int64), -> np.empty((size, 5, BINS), np.int64),": "scratch memory with a row to spare: only the first four are used",  # noqa: E501
    'bitplan/files/poly_network.py return "older" if spread > 2.0**-6 and 0.2 < negative < 0.8 else None -> return "older" if spread > 2.0**-6 and 0.2 <= negative < 0.8 else None': "a share in float32 is never the float64 0.2, so it cannot be equal",  # noqa: E501
    "bitplan/trees/grow.py share = max(-(-size // thread_count()), 1) -> share = max(-(-size // thread_count()), 2)": "how rows are shared out to threads does not change their order",  # noqa: E501
    "bitplan/formats/scale_checks.py crowded = (2 * at_end >= numbers) & (numbers > 0) if isinstance(fmt.scales, BasedScales) else scales.top -> crowded = (2 * at_end >= numbers) & (numbers >= 0) if isinstance(fmt.scales, BasedScales) else scales.top": "formats of based scales have blocks of 16 or 128 columns, and no block without a number",  # noqa: E501
    "bitplan/streaming/selective/precision_units.py longest = max(shared.values(), default=0) -> longest = max(shared.values(), default=1)": "the default is for a block without units, of which none is listed either way",  # noqa: E501
    "bitplan/files/poly_network.py negative = float((own < 0).float().mean()) -> negative = float((own < 1).float().mean())": "zeros were left out before",  # noqa: E501
    'bitplan/plan/plan.py return json.dumps(self.to_document(), indent=2, ensure_ascii=False, allow_nan=False) + "\\n" -> return json.dumps(self.to_document(), indent=2, ensure_ascii=False, allow_nan=True) + "\\n"': "`Choice` refuses evidence with NaN, and a plan holds no other floats",  # noqa: E501
    "bitplan/plan/plan.py if self.part is not None and self.part not in get_format(self.choice.format).part_layouts((2, 2)): -> if self.part is not None and self.part not in get_format(self.choice.format).part_layouts((2, 3)):": "which parts a format has does not depend on the shape",  # noqa: E501
    "bitplan/trees/thread_workspace.py if self._parts is None or self._parts[0].shape[1] != self._cells * narrow: -> if self._parts is None or self._parts[1].shape[1] != self._cells * narrow:": "scratch memory is made anew for each tree: slower, the same result",  # noqa: E501
    'bitplan/files/safetensors.py head = self._read_bytes("the first bytes", 0, min(self._size, 8)) -> head = self._read_bytes("the first bytes", 0, min(self._size, 9))': "only how the bytes begin is looked at, and no known beginning is longer than 8",  # noqa: E501
    "bitplan/trees/grow.py while nodes := growth.take_together(1 if self._shards.count == 1 else NODES_A_STEP): -> while nodes := growth.take_together(1 if self._shards.count == 2 else NODES_A_STEP):": "the tree is the same however many leaves are expanded at a time",  # noqa: E501
    "bitplan/formats/format.py height = fmt.block.rows or 1 -> height = fmt.block.rows or 2": "where one block is the whole tensor, the tensor is one row, and half of it, rounded up, is one, too",  # noqa: E501
    "bitplan/plan/plan.py if self.part is not None and self.part not in get_format(self.choice.format).part_layouts((2, 2)): -> if self.part is not None and self.part not in get_format(self.choice.format).part_layouts((3, 2)):": "which parts a format has does not depend on the shape",  # noqa: E501
}


@dataclass(frozen=True)
class Mutant:
    path: str  # from the root
    line: int
    start: int  # offset of what is replaced in the file's bytes
    end: int
    new: str
    kind: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def shown(self, source: bytes) -> str:
        before, after = (text.decode().splitlines()[self.line - 1].strip() for text in (source, self.apply(source)))
        return f"{self.path}:{self.line} {before} -> {after}"


def without_line(shown: str) -> str:
    """What a mutant shows, less the number of its line, which moves with every change above it."""
    return re.sub(r"^([^ :]+):\d+ ", r"\1 ", shown)


# ---- where mutants are -----------------------------------------------------------------------------------------------


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """Every place of a module that can be changed. Annotations, docstrings and f-strings are left alone."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def replace(node: ast.AST, new: str, kind: str) -> Mutant:
        start, end = at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        return Mutant(path, node.lineno, start, end, new, kind)  # type: ignore[attr-defined]

    def between(left: ast.expr, right: ast.expr, operator: ast.AST, kind: str) -> Iterator[Mutant]:
        old, new = SWAPPED[type(operator)]
        begin, end = at(left.end_lineno or 0, left.end_col_offset or 0), at(right.lineno, right.col_offset)
        place = source.find(old.encode(), begin, end)
        if place >= 0:
            line = source.count(b"\n", 0, place) + 1
            yield Mutant(path, line, place, place + len(old), new, kind)

    def visit(node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr):  # Python 3.11 does not say where its parts are
            return
        if isinstance(node, ast.Compare):
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from between(left, right, operator, "compare")
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
            yield from between(node.left, node.right, node.op, "arithmetic")
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node.op, "logic")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield replace(node, ast.get_source_segment(source.decode(), node.operand) or "True", "not")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield replace(node, str(not node.value), "constant")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield replace(node, str(node.value + 1), "constant")
        elif isinstance(node, ast.Return) and node.value is not None and not is_none(node.value):
            yield replace(node, "return None", "return")
        elif isinstance(node, ast.Raise):
            yield replace(node, "pass", "raise")
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST):
                    yield from visit(each)

    yield from visit(ast.parse(source))


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def sample(tests_of_line: dict[str, dict[int, list[str]]], parts: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of lines that a test runs, the same for the same code and seed."""
    result = []
    for part in parts:
        for file in sorted((ROOT / "bitplan" / part).glob("**/*.py")):
            path = str(file.relative_to(ROOT))
            reached = tests_of_line.get(path, {})
            result += [mutant for mutant in mutants_of(path, file.read_bytes()) if mutant.line in reached]
    return random.Random(seed).sample(result, min(count, len(result)))


def find_again(rows: list[dict[str, Any]]) -> dict[int, Mutant | None]:
    """The mutants of earlier rows in today's code, by number; None where the text is gone.

    Of several lines with the same text the nearest one is taken, and none twice.
    """
    by_text: dict[str, list[Mutant]] = {}
    for path in {row["shown"].split(":")[0] for row in rows}:
        if (ROOT / path).exists():
            source = (ROOT / path).read_bytes()
            for mutant in mutants_of(path, source):
                by_text.setdefault(without_line(mutant.shown(source)), []).append(mutant)
    result: dict[int, Mutant | None] = {}
    for row in sorted(rows, key=lambda row: row["number"]):
        if row["number"] in result:
            raise SystemExit(f"--again: number {row['number']} is in the files twice: give the parts of one run")
        line = int(row["shown"].split(" ")[0].split(":")[1])
        found = by_text.get(without_line(row["shown"]), [])
        result[row["number"]] = min(found, key=lambda mutant: abs(mutant.line - line), default=None)
        if found:
            found.remove(result[row["number"]])  # type: ignore[arg-type]
    return result


# ---- which tests notice ----------------------------------------------------------------------------------------------


def read_contexts(path: Path) -> dict[str, dict[int, list[str]]]:
    """{file: {line: tests that run it}}; what runs while modules are imported belongs to no test."""
    from coverage import CoverageData

    data = CoverageData(str(path))
    data.read()
    result: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        relative = "bitplan/" + file.split("/bitplan/")[-1]
        lines = data.contexts_by_lineno(file)
        result[relative] = {
            line: sorted({context.rsplit("|", 1)[0] for context in contexts if "::" in context})
            for line, contexts in lines.items()
            if any("::" in context for context in contexts)
        }
    return result


def tests_for(mutant: Mutant, tests: list[str], most: int) -> list[str]:
    """The tests of a line, the likeliest to notice first: those of the module, then of its folder, then all others.

    Of one function some come before the next function and the rest at the end: more of them where they are near.
    """
    folder, name = mutant.path.replace("bitplan/", "tests/", 1).removesuffix(".py").rsplit("/", 1)
    while not (ROOT / folder).exists():  # one folder of tests may be that of several rooms
        folder = folder.rsplit("/", 1)[0]
    turns: dict[str, int] = {}

    def rank(test: str) -> tuple[int, int, str]:
        function = test.split("[")[0]
        turns[function] = turns.get(function, -1) + 1
        near = test.startswith(f"{folder}/")
        own = near and f"/test_{name}.py::" in test
        return turns[function] // (16 if near else 2), 0 if own else 1 if near else 2, test

    return sorted(sorted(tests), key=rank)[:most]


# ---- one mutant, one forked process ----------------------------------------------------------------------------------


class Mutated(MetaPathFinder):
    """Imports one module from changed source, all else as it is."""

    def __init__(self, module: str, source: bytes) -> None:
        self.module, self.source = module, source

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None
        assert spec.origin is not None
        source = self.source

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str):  # type: ignore[no-untyped-def]
                return compile(source, self.path, "exec", dont_inherit=True)

        spec.loader = Loader(name, spec.origin)
        return spec


class Notice:
    """Writes into a pipe which test began and which failed, or that tests could not be collected."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self.pipe, f"began {nodeid}\n".encode())

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.pipe, f"failed {report.nodeid}\n".encode())

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.pipe, b"failed collection\n")


def run_tests(mutant: Mutant | None, tests: list[str], limit_s: float) -> tuple[str, str]:
    """("passed" | "failed" | "timeout" | "broken", the test that did) of a forked process with the mutant in place.

    The limit is for one test: a long list of tests that all end is no timeout. "broken" is a pytest that crashed, or
    that could not run a test.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        _child(mutant, tests, writer)
    os.close(writer)
    os.set_blocking(reader, False)
    until, status, said = time.monotonic() + limit_s, None, b""
    while status is None and time.monotonic() < until:
        time.sleep(0.02)
        done, result = os.waitpid(child, os.WNOHANG)
        status = result if done else None
        with suppress(BlockingIOError):  # nothing new
            if more := os.read(reader, 1 << 16):
                until, said = time.monotonic() + limit_s, said + more
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(reader)
    lines = [line.split(" ", 1) for line in said.decode().splitlines()]
    for event, test in lines:
        if event == "failed":
            return "failed", test
    if status is None:
        return "timeout", lines[-1][1] if lines else ""
    if os.waitstatus_to_exitcode(status) == 0:
        return "passed", ""
    return "broken", lines[-1][1] if lines else ""  # the test that crashed


def judge(mutant: Mutant, tests: list[str], limit_s: float) -> tuple[str, str]:
    """What became of a mutant, and by which test. A test that fails without the mutant too has noticed nothing."""
    left = list(tests)
    while left:
        result, by = run_tests(mutant, left, limit_s)
        if result == "passed":
            break
        control = left if by in ("", "collection") else [by]
        if run_tests(None, control, limit_s)[0] == "passed":
            return ("timeout" if result == "timeout" else "killed" if result == "failed" else "crashed"), by
        if control is left:
            return "broken", by
        left.remove(by)
    return ("survived" if left else "broken"), ""


def _child(mutant: Mutant | None, tests: list[str], pipe: int) -> None:
    import pytest

    if mutant is not None:
        module = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        source = mutant.apply((ROOT / mutant.path).read_bytes())
        sys.meta_path.insert(0, Mutated(module, source))
        lines = source.decode().splitlines(keepends=True)  # Triton compiles what `inspect` reads, not the module's code
        linecache.cache[str(ROOT / mutant.path)] = len(source), None, lines, str(ROOT / mutant.path)
    code = 3
    try:
        sink = io.StringIO()
        with redirect_stdout(sink), redirect_stderr(sink):
            without = [f"-pno:{name}" for name in ("randomly", "cacheprovider", "cov", "xdist")]
            code = int(pytest.main(["-x", *without, *tests], plugins=[Notice(pipe)]))
    finally:
        os._exit(code)


def warm() -> None:
    """Load what every test needs and no mutant changes, once for all forks; pytest's plugins must not be loaded yet."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its own functions are interpreted, too
    for module in ("torch", "torch._dynamo", "numba", "gguf", "safetensors.torch", "typer"):
        importlib.import_module(module)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=int, default=100, help="most tests for one mutant")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one test")
    parser.add_argument("--again", nargs="+", type=Path, help="earlier outputs: the same faults, no sample")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="sample these parts alone")
    parser.add_argument("--only", nargs="*", type=int, help="numbers of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at a time")
    parser.add_argument("--list", action="store_true", help="show the sample, run nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "mutants.json")
    options = parser.parse_args()

    sys.path.insert(0, str(ROOT))
    tests_of_line = read_contexts(options.coverage)
    if options.again:
        earlier = [row for file in options.again for row in json.loads(file.read_text())["mutants"]]
        mutants, shown = find_again(earlier), {row["number"]: row["shown"] for row in earlier}
    else:
        mutants = dict(enumerate(sample(tests_of_line, options.parts, options.count, options.seed)))
        shown = {}
    if options.only is not None:
        mutants = {number: mutant for number, mutant in mutants.items() if number in options.only}
    if not options.list:
        os.chdir(ROOT)
        warm()

    def try_one(number: int) -> dict[str, Any]:
        mutant = mutants[number]
        if mutant is None:
            return {"number": number, "kind": "", "shown": shown[number], "result": "gone", "by": ""}
        row = {"number": number, "kind": mutant.kind, "shown": mutant.shown((ROOT / mutant.path).read_bytes())}
        tests = tests_for(mutant, tests_of_line.get(mutant.path, {}).get(mutant.line, []), options.tests)
        if options.list:
            return row | {"result": f"{len(tests)} tests", "by": ""}
        result, by = judge(mutant, tests, options.limit) if tests else ("survived", "no test runs this line")
        if result == "survived" and without_line(row["shown"]) in EQUIVALENT:
            result = "equivalent"
        return row | {"result": result, "by": by}

    rows = []
    for row in in_processes(try_one, list(mutants), options.jobs):
        print(f"{row['number']} {row['result']}: {row['shown']} [{row['by']}]", flush=True)
        rows.append(row)
        if not options.list:
            document = {"seed": options.seed, "count": options.count, "mutants": sorted(rows, key=itemgetter("number"))}
            options.output.write_text(json.dumps(document, indent=1) + "\n")
    if not options.list:
        print(Counter(row["result"] for row in rows))


def in_processes(work: Callable[[int], dict[str, Any]], numbers: list[int], jobs: int) -> Iterator[dict[str, Any]]:
    """`work` of every number, `jobs` at a time, in processes forked from this one; as they end."""
    if jobs == 1:
        yield from map(work, numbers)
        return
    global _work
    _work = work  # functions inside functions cannot be sent, only inherited
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_do, numbers)


def _do(number: int) -> dict[str, Any]:
    return _work(number)


_work: Callable[[int], dict[str, Any]]


if __name__ == "__main__":
    main()
