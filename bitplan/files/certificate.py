"""The certificate of what bitplan quantized: by which plan, of which weights, with which code, and what was measured.

A folder has it as bitplan_evidence.json, be it packed, written for another engine, or that of a search; a .safetensors
or .gguf file, or the first part of a split one, as the metadata key `bitplan_evidence`. One changed byte anywhere is
found: the certificate has the hash of every other file, and of the file that it is in, computed with `SEAL` in its
place. The document, version 1:

    {"document": "bitplan-certificate", "version": 1, "seal": HASH of the file that holds this,
     "plan_sha256": HASH, "plan": PLAN, where no file beside has it,
     "source": {"name": N, "base_model": N, "files": {NAME: HASH}}, the weights that were quantized,
     "rounding": {"evidence": HASH} by statistics of a text, {"scale_rule": RULE or null}, or {"held": true} for what
                 `save_packed` wrote as a model held it,
     "code": {"sha256": HASH, "versions": {...}}, "machine": {...},
     "search": {"goal": {...}, "measured": {"kl": X, "kl_standard_error": X, "kl_interval": [X, X], "windows": N, ...},
                "nearest": the same without statistics, "nats_by_layer": {NUMBER: NATS}, "machine": {...},
                "evidence": EVIDENCE, in the folder of a search beside},
     "files": {NAME: HASH}, the other files of a folder, or the other parts in order}

`search` is there where the plan and the statistics are those that a search proved together. Hashes are SHA-256.

A model card is README.md with the fields that Hugging Face reads, and a picture.

Both are made from the folder's certificate and plan (`files.certificate`). A card that somebody else wrote stays.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from bitplan.base.documents import OBJECT, SIZE, Kind, Reader, one_of, or_null
from bitplan.base.errors import BitplanError, FileFormatError, Finding
from bitplan.base.hardware import code_sha256, code_versions, hardware
from bitplan.base.records import atomic_file, parse_json, read_bytes, read_json
from bitplan.files.tensor_bytes import DOCUMENT, SEAL, sealed_sha256
from bitplan.formats import get_format
from bitplan.plan.names import natural_order, split_layer
from bitplan.plan.plan import PACKED_PLAN, PLAN_NAME, Plan

VERSION = 1
EVIDENCE_FILE = "bitplan_evidence.json"
SEARCH_FILES = (
    *("evidence.json", "evidence.safetensors", "statistics.safetensors"),
    *(PLAN_NAME, "front.json", "report.html"),
)
MOST_EVIDENCE_BYTES = 2**22  # a larger document of a search is left out of the certificate
_HASH = Kind("64 hexadecimal digits", lambda value: type(value) is str and bool(re.fullmatch("[0-9a-f]{64}", value)))
_KEYS = {
    "document": one_of(DOCUMENT),
    "version": SIZE,
    "seal": _HASH,
    "plan_sha256": _HASH,
    "plan": OBJECT,
    "source": OBJECT,
    "rounding": OBJECT,
    "code": OBJECT,
    "machine": OBJECT,
    "search": or_null(OBJECT),
    "files": OBJECT,
}


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- what a search proved --------------------------------------------------------------------------------------------


def search_folder(path: Path) -> Path | None:
    """The folder of a search that holds this plan or evidence, or is it; None where it is no search's."""
    folder = path if path.is_dir() else path.parent
    return folder if all((folder / name).is_file() for name in ("front.json", "evidence.json", PLAN_NAME)) else None


def search_facts(path: Path) -> dict[str, Any] | None:
    """What a search measured of its plan with its statistics, for a certificate; None where the folder is none's."""
    folder = search_folder(path)
    if folder is None:
        return None
    front = Reader(str(folder / "front.json"), FileFormatError, strict=False).keys(
        "", read_json(folder / "front.json"), {"goal": OBJECT, "plan": OBJECT}, ("goal", "plan")
    )
    nats = Counter[str]()
    for cell in front.get("heat", ()):
        nats[cell["layer"] or "other"] += cell["nats"]
    evidence = read_json(folder / "evidence.json")
    evidence |= {"model": Path(str(evidence.get("model"))).name}  # the path is of this machine
    is_small = len(json.dumps(evidence)) <= MOST_EVIDENCE_BYTES
    return {
        "goal": front["goal"],
        "measured": {key: value for key, value in front["plan"].items() if key != "choice"},
        "nearest": front.get("nearest"),
        "nats_by_layer": dict(nats),
        "machine": front.get("machine"),
        "evidence": evidence if is_small else None,
    }


def evidence_of_search(plan: Path) -> Path | None:
    """The statistics of a search whose folder is given as a plan; None for a plan's own file."""
    path = plan / "evidence.safetensors"
    return path if plan.is_dir() and search_folder(plan) is not None and path.is_file() else None


def proven_otherwise(plan: Path) -> str | None:
    """A warning for a plan that is applied without the statistics that it was proven with; None for other plans."""
    facts, folder = search_facts(plan), search_folder(plan)
    if facts is None or folder is None:
        return None
    kl = "its KL was not measured" if facts["nearest"] is None else f"it has {facts['nearest']['kl']:.4g}"
    step = f"with the folder {folder} as the plan they are taken along"
    if not (folder / "evidence.safetensors").is_file():
        step = f"they are no longer there: bring evidence.safetensors back into {folder}, or search again"
    return (
        f"{plan}: the plan was proven with statistics of its text, KL {facts['measured']['kl']:.4g}, and without them "
        f"{kl} on the same text; {step}"
    )


def has_formats_of(plan: Plan, other: Plan) -> bool:
    """Whether a plan has the formats of `other` for weights and inputs; unpacked tensors may have other types."""
    packed = {name: entry.choice.shown for name, entry in other.entries.items() if entry.stored is None}
    return all(name in plan and plan[name].shown == shown for name, shown in packed.items())


# ---- writing ---------------------------------------------------------------------------------------------------------


def certificate_of(
    plan: Plan,
    source: Path,
    files: Iterable[Path],
    *,
    evidence: Path | None = None,
    scale_rule: str | None = None,
    held: bool = False,
    proof: tuple[Plan, dict[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    holds_plan: bool,
) -> dict[str, Any]:
    """A certificate of weights quantized by a plan, but for what is known when they are written.

    source      the model that they are of, or its name
    files       those of its weights
    evidence    the statistics by which they were rounded
    held        they are as a model in memory held them
    proof       `proof_of` the source: what a search proved stays proven where every weight keeps its format
    config      of the model, which may name its repository
    holds_plan  the plan is a part of it, where no file beside has it
    """
    search = None
    if evidence is not None and (folder := search_folder(evidence)) is not None:
        search = search_facts(folder) if has_formats_of(plan, Plan.load(folder / PLAN_NAME)) else None
    elif evidence is None and proof is not None and has_formats_of(plan, proof[0]):
        search = proof[1]
    text = plan.to_json()
    rounding = {"held": True} if held else {"scale_rule": scale_rule}
    return {
        "document": DOCUMENT,
        "version": VERSION,
        "seal": SEAL,
        "plan_sha256": hashlib.sha256(text.encode()).hexdigest(),
        **({"plan": json.loads(text)} if holds_plan else {}),
        "source": {
            "name": source.resolve().name,
            "base_model": base_model(source, config or {}),
            "files": {path.name: sha256_of(path) for path in files},
        },
        "rounding": rounding if evidence is None else {"evidence": sha256_of(evidence)},
        "code": {"sha256": code_sha256(), "versions": code_versions()},
        "machine": hardware(),
        "search": search,
    }


def written_plan(plan: Plan, written: Mapping[str, tuple[str | None, str]], tied: Mapping[str, str]) -> Plan:
    """A plan as an engine's files hold it, which may leave tensors unpacked, or cast them.

    written   name -> the format that it has there, None for its own type, and the reason
    tied      alias -> name
    """
    entries = dict(plan.entries)
    for name, (fmt, reason) in written.items():
        entry = entries[name]
        if fmt is not None:
            choice = entry.choice
            if choice.format != fmt:
                rounded = None if get_format(fmt).is_cast else choice.input
                choice = replace(choice, format=fmt, reason=reason, input=rounded)
            entries[name] = replace(entry, choice=choice, stored=None)
    for alias, name in tied.items():
        if alias in entries and name in written:
            entries[alias] = replace(entries[alias], choice=entries[name].choice, stored=entries[name].stored)
    return Plan(entries, padding=plan.padding)


def part_seals(count: int) -> list[str]:
    """Placeholders in the first part's certificate, one for each other part, which the parts' hashes replace later."""
    return [f"sha256-of-part-{number:05d}".ljust(64, "=") for number in range(2, count + 1)]


def settled_certificate(
    folder: Path, fresh: Mapping[str, Any] | None, earlier: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The certificate for weights that are written: an earlier one where they are the same files, bit for bit."""
    if earlier is None or fresh is None or earlier["plan_sha256"] != fresh["plan_sha256"]:
        return fresh
    digests = {name: digest for name, digest in earlier.get("files", {}).items() if name.endswith(".safetensors")}
    same = {path.name for path in folder.glob("*.safetensors")} == digests.keys()
    return earlier if same and all(sha256_of(folder / name) == digest for name, digest in digests.items()) else fresh


def write_certificate(folder: Path, certificate: Mapping[str, Any], names: Sequence[str] | None = None) -> None:
    """Write a folder's certificate, with the hashes of all files that are there, or of these."""
    files = {name: sha256_of(folder / name) for name in (_covered(folder) if names is None else names)}
    document = {**certificate, "seal": SEAL, "files": files}
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    seal = hashlib.sha256(text.encode()).hexdigest()
    with atomic_file(folder / EVIDENCE_FILE) as file:
        file.write(text.replace(SEAL, seal, 1).encode())


def certify_search(folder: Path, source: Path, files: Iterable[Path]) -> None:
    """Write the certificate of a search's folder: of its own files, for others may lie there."""
    evidence = folder / "evidence.safetensors"
    certificate = certificate_of(
        Plan.load(folder / PLAN_NAME),
        source,
        files,
        evidence=evidence if evidence.is_file() else None,
        holds_plan=False,
    )
    search = {**(search_facts(folder) or {}), "evidence": None}  # it is beside
    certify_again(folder, {**certificate, "search": search})


def certify_again(folder: Path, certificate: Mapping[str, Any] | None = None) -> None:
    """Write a certificate, or the one that is there, for the files that a search's folder has now, with its page."""
    current = certificate or read_certificate(folder, None)
    assert current is not None
    write_certificate(folder, current, [name for name in SEARCH_FILES if (folder / name).is_file()])


def _covered(folder: Path) -> list[str]:
    """Files of a folder that a certificate is of: all but itself and hidden ones, which programs put there."""
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    names = [path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)]
    return natural_order([name for name in names if name != EVIDENCE_FILE])


# ---- reading and checking --------------------------------------------------------------------------------------------


def read_certificate(path: Path, text: str | None) -> dict[str, Any] | None:
    """The certificate of a folder, or of a file whose metadata hold `text`; None where there is none."""
    if path.is_dir():
        if not (path / EVIDENCE_FILE).is_file():
            return None
        path, raw = path / EVIDENCE_FILE, read_bytes(path / EVIDENCE_FILE)
    elif text is None:
        return None
    else:
        raw = text.encode()
    reader = Reader(str(path), FileFormatError)
    document = parse_json(raw, where=f"{path}: certificate")
    reader.require_document(document, DOCUMENT, EVIDENCE_FILE)
    reader.version(document, VERSION)
    certificate: dict[str, Any] = reader.keys("", document, _KEYS, tuple(key for key in _KEYS if key not in _OPTIONAL))
    return certificate


def proof_of(source: Path, text: str | None, files: Sequence[Path]) -> tuple[Plan, dict[str, Any]] | None:
    """What a search proved of a source that bitplan wrote, with its plan; None where there is none, or a byte changed.

    text    the certificate in a file's metadata
    files   those of its weights
    """
    folder = source if source.is_dir() else source.parent
    target = folder if (folder / EVIDENCE_FILE).is_file() else source
    try:
        certificate = read_certificate(target, text)
        if certificate is None or certificate["search"] is None or (target.is_dir() and search_folder(target)):
            return None
        holder = target / EVIDENCE_FILE if target.is_dir() else files[0]
        if not is_sealed(holder, certificate) or byte_findings(target, certificate, files):
            return None
        if "plan" in certificate:
            return Plan.from_document(certificate["plan"], where=str(target)), certificate["search"]
        return Plan.load(target / PACKED_PLAN), certificate["search"]
    except (BitplanError, UnicodeError):
        return None


def earlier_certificate(folder: Path) -> dict[str, Any] | None:
    """The certificate of a folder, None where there is none that can be read."""
    with suppress(BitplanError, OSError, UnicodeError):
        return read_certificate(folder, None)
    return None


_OPTIONAL = ("plan", "files")
_CHANGED = "other bytes than were written; copy or write it again"


def is_sealed(holder: Path, certificate: Mapping[str, Any]) -> bool:
    """Whether the file that holds a certificate, and so the certificate, is as it was written."""
    return bool(sealed_sha256(holder, certificate["seal"]) == certificate["seal"])


def byte_findings(path: Path, certificate: Mapping[str, Any], parts: Sequence[Path]) -> list[Finding]:
    """Files beside the certificate that are not as they were written; `parts` are those of a split file."""
    files = certificate.get("files", {})
    if not path.is_dir():
        pairs = zip(parts[1:], files.values(), strict=True)
        return [Finding("bytes", part.name, _CHANGED) for part, digest in pairs if sha256_of(part) != digest]
    covered, findings = _covered(path) if search_folder(path) is None else [*files], []
    for name in natural_order(files):
        if name not in covered or not (path / name).is_file():
            findings.append(Finding("bytes", name, "missing: the folder had it when it was written; copy it again"))
        elif sha256_of(path / name) != files[name]:
            findings.append(Finding("bytes", name, _CHANGED))
    added = [name for name in covered if name not in files and name != CARD]
    return findings + [Finding("bytes", name, "added: the certificate knows nothing of it") for name in added]


def source_findings(certificate: Mapping[str, Any], source: Path, files: Sequence[Path]) -> list[Finding]:
    """Whether a model is the one that was quantized, by the bytes of its weights."""
    expected, paths = certificate["source"]["files"], {path.name: path for path in files}
    if len(expected) == len(paths) == 1:  # a single file may be called otherwise now
        expected = dict.fromkeys(paths, next(iter(expected.values())))
    differing = [
        name for name in natural_order(expected) if name not in paths or sha256_of(paths[name]) != expected[name]
    ]
    text = "is missing, or has other bytes than the one that was quantized; give the model that this was made of"
    return [Finding("source", str(source), f"{name} {text}") for name in differing]


# ---- the model card --------------------------------------------------------------------------------------------------


CARD, PICTURE = "README.md", "bitplan_plan.svg"
_BY_US = "<!-- written by bitplan: quantizing into this folder again replaces this page -->"
# Fields of a model's own card that hold for the quantized model as well.
_CARD_FIELDS = ("license", "license_name", "license_link", "language", "pipeline_tag")
# For each target of `files.engines`, and for packed folders: library_name, a tag, and how to load the folder.
_TRANSFORMERS = "from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained(FOLDER"
_LIBRARIES = {
    "bitplan": ("transformers", "bitplan", f"import bitplan.transformers\n{_TRANSFORMERS})"),
    "compressed-tensors": ("transformers", "compressed-tensors", f"{_TRANSFORMERS})"),
    "torchao": ("transformers", "torchao", f'{_TRANSFORMERS}, dtype="auto")'),
    "mlx": ("mlx", "mlx", "from mlx_lm import load\n\nmodel, tokenizer = load(FOLDER)"),
    "hf": ("transformers", "safetensors", f"{_TRANSFORMERS})"),
}


def is_card_of_ours(path: Path) -> bool:
    """Whether a README.md may be replaced: there is none, or bitplan wrote it."""
    try:
        return not path.exists() or _BY_US in read_bytes(path, noun="model card").decode(errors="replace")
    except BitplanError:
        return False


def write_card(folder: Path, plan: Plan, certificate: Mapping[str, Any], source: Path | None, target: str) -> None:
    """Write README.md and its picture; `source` has the model's own card, `target` is for whom the folder is."""
    card = model_card(plan, certificate, None if source is None else source / CARD, target)
    (folder / CARD).write_text(card, encoding="utf-8")
    (folder / PICTURE).write_text(draw_plan(plan, certificate["search"]), encoding="utf-8")


def base_model(source: Path, config: Mapping[str, Any]) -> str:
    """A model's repository where its config or its place in Hugging Face's cache names one, else its folder's name."""
    name = config.get("_name_or_path")
    if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    path = source.resolve()
    cached = next((part for part in reversed(path.parts) if part.startswith("models--")), None)
    return path.name if cached is None else "/".join(cached.split("--")[1:])


def model_card(plan: Plan, certificate: Mapping[str, Any], theirs: Path | None, target: str = "bitplan") -> str:
    """Hugging Face's fields, sizes by format, the picture, and what was measured."""
    library, tag, code = _LIBRARIES[target]
    source = certificate["source"]
    fields = [f"base_model: {json.dumps(source.get('base_model', source['name']))}"]
    fields += ["base_model_relation: quantized", f"library_name: {library}"]
    fields += ["tags:", *(f"- {name}" for name in dict.fromkeys(("bitplan", "quantized", tag)))]
    fields += [] if theirs is None else _fields_of(theirs)
    counts, sizes = Counter[str](), Counter[str]()
    for entry in plan.entries.values():
        fmt = entry.stored or entry.choice.format
        counts[fmt], sizes[fmt] = counts[fmt] + 1, sizes[fmt] + entry.nbytes
    total = max(1, sizes.total())
    rows = [
        f"| {fmt} | {counts[fmt]} | {nbytes / 1e6:,.2f} | {nbytes / total:.1%} |" for fmt, nbytes in sizes.most_common()
    ]
    check = (
        "`bitplan verify FOLDER` holds it against `bitplan_evidence.json`: what it was made of, with what, and where."
    )
    lines = [
        *("---", *fields, "---", "", _BY_US, "", f"# {source['name']}, quantized by bitplan", ""),
        *(f"{sizes.total() / 1e6:,.2f} MB of weights:", ""),
        *("| format | tensors | MB | share |", "|---|---|---|---|", *rows, ""),
        *(f"![Bytes of every layer by format]({PICTURE})", "", *_measured(certificate["search"]), ""),
        *("```python", code, "```", "", check, ""),
    ]
    return "\n".join(lines)


def _measured(search: Mapping[str, Any] | None) -> list[str]:
    if search is None:
        return ["Its distance from the model was not measured: `bitplan judge MODEL FOLDER --text FILE` does."]
    facts, interval = search["measured"], search["measured"].get("kl_interval")
    between = "" if not interval else f" ({interval[0]:.4g} to {interval[1]:.4g})"
    return [
        f"On {facts['tokens']} tokens that were held out: KL from the model {facts['kl']:.4g}{between} nats a token, "
        f"perplexity {facts['perplexity']:.4g}, same top token {facts['top1_agreement']:.2%}."
    ]


def _fields_of(card: Path) -> list[str]:
    """The lines of a model's own card (license, language, ...) that also hold for a model made of it, unchanged."""
    if not card.is_file():
        return []
    lines = read_bytes(card, noun="model card").decode(errors="replace").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return []
    rest, is_wanted = [], False
    for line in lines[1 : lines.index("---", 1)]:
        if line[:1] not in (" ", "-", "#", ""):
            is_wanted = line.partition(":")[0] in _CARD_FIELDS
        if is_wanted and line.strip():
            rest.append(line)
    return rest


# ---- the picture -----------------------------------------------------------------------------------------------------

_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#6b7280")
_WIDTH, _HEIGHT, _LEFT, _TOP = 760, 150, 70, 34  # of a panel, in units of the picture
_REST = "other"


def draw_plan(plan: Plan, search: Mapping[str, Any] | None) -> str:
    """An SVG picture: megabytes of every layer by format, and where a search gives it, the damage of every layer."""
    layers: dict[str, Counter[str]] = {}
    for name, entry in plan.entries.items():
        layers.setdefault(split_layer(name)[1] or _REST, Counter())[entry.stored or entry.choice.format] += entry.nbytes
    order = [*natural_order([layer for layer in layers if layer != _REST]), *([_REST] if _REST in layers else [])]
    totals = sum(layers.values(), Counter[str]())
    colours = {fmt: _COLOURS[at % len(_COLOURS)] for at, (fmt, _) in enumerate(totals.most_common())}
    bytes_of = [[(colours[fmt], layers[layer][fmt] / 1e6) for fmt in totals if layers[layer][fmt]] for layer in order]
    marks = _panel("MB by layer and format", order, bytes_of, _TOP)
    nats = None if search is None else search.get("nats_by_layer")
    bottom = _TOP + _HEIGHT + 30
    if nats:
        damage = [[(_COLOURS[-1], max(0.0, nats.get(layer, 0.0)))] for layer in order]
        marks += _panel("predicted KL by layer, nats", order, damage, bottom + 24)
        bottom += _HEIGHT + 54
    left = _LEFT
    for fmt, colour in colours.items():
        label = f"{fmt} ({totals[fmt] / max(1, totals.total()):.0%})"
        if left + 7 * len(label) > _WIDTH - 20 and left > _LEFT:
            left, bottom = _LEFT, bottom + 20
        marks.append(f'<rect x="{left}" y="{bottom}" width="11" height="11" fill="{colour}"/>')
        marks.append(f'<text x="{left + 16}" y="{bottom + 10}">{escape(label)}</text>')
        left += 30 + 7 * len(label)
    height = bottom + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12" fill="#1f2937"'
    background = f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join(
        [f'{head} role="img" {style}>', "<title>Formats of every layer</title>", background, *marks, "</svg>\n"]
    )


def _panel(title: str, names: Sequence[str], stacks: Sequence[Sequence[tuple[str, float]]], top: int) -> list[str]:
    """Draw SVG lines of a bar chart: one stacked bar for each name, and a scale of three lines."""
    highest = max((sum(size for _, size in stack) for stack in stacks), default=0.0) or 1.0
    step = (_WIDTH - _LEFT - 20) / max(1, len(names))
    every = max(1, round(28 / step))  # names that fit side by side
    marks = [f'<text x="{_LEFT}" y="{top - 12}" font-weight="bold">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = top + _HEIGHT * (1 - share)
        marks.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d1d5db"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{highest * share:.3g}</text>')
    for at, (name, stack) in enumerate(zip(names, stacks, strict=True)):
        x, y = _LEFT + step * (at + 0.1), float(top + _HEIGHT)
        for colour, size in stack:
            high = _HEIGHT * size / highest
            y -= high
            marks.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.8 * step:.1f}" height="{high:.1f}" fill="{colour}"/>'
            )
        if name == _REST or (at % every == 0 and (names[-1] != _REST or len(names) - at > every)):
            marks.append(
                f'<text x="{x + 0.4 * step:.1f}" y="{top + _HEIGHT + 16}" text-anchor="middle">{escape(name)}</text>'
            )
    return marks
