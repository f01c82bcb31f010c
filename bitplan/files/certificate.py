"""The certificate of what bitplan quantized: by which plan, of which weights, with which code, and what was measured.

A packed folder has it as bitplan_evidence.json, a single .safetensors or .gguf file as the metadata key
`bitplan_evidence`. One changed byte anywhere is found: the certificate of a folder has the hash of every other file,
that of a file is part of the file, and both hold the hash of the file that they are in, computed with `SEAL` in its
place. The document, version 1:

    {"document": "bitplan-certificate", "version": 1, "seal": HASH of the file that holds this,
     "plan_sha256": HASH, "plan": PLAN, in a single file; a folder has it beside,
     "source": {"name": N, "files": {NAME: HASH}}, the weights that were quantized,
     "rounding": {"evidence": HASH} by statistics of a text, or {"scale_rule": RULE or null},
     "code": {"sha256": HASH, "versions": {...}}, "machine": {...},
     "search": {"goal": {...}, "measured": {"kl": X, "kl_standard_error": X, "kl_interval": [X, X], "windows": N, ...},
                "nearest": the same without statistics, "machine": {...}, "evidence": EVIDENCE},
     "files": {NAME: HASH}, in a folder}

`search` is there where the plan and the statistics are those that a search proved together. Hashes are SHA-256.

A folder also gets a model card, README.md, with the fields that Hugging Face reads; one that others wrote stays.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitplan.base.documents import OBJECT, SIZE, Kind, Reader, one_of, or_null
from bitplan.base.errors import BitplanError, FileFormatError
from bitplan.base.hardware import code_sha256, code_versions, hardware
from bitplan.base.records import atomic_file, parse_json, read_bytes, read_json
from bitplan.files.tensor_bytes import SEAL, sealed_sha256
from bitplan.plan.check_manifest import Finding
from bitplan.plan.names import natural_order
from bitplan.plan.plan import PLAN_NAME, Plan

DOCUMENT, VERSION = "bitplan-certificate", 1
EVIDENCE_FILE = "bitplan_evidence.json"
CARD = "README.md"
MOST_EVIDENCE_BYTES = 2**22  # a larger document of a search is left out of the certificate
_BY_US = "<!-- written by bitplan: quantizing into this folder again replaces this page -->"
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
# Fields of a model's own card that hold for the quantized model as well.
_CARD_FIELDS = ("license", "license_name", "license_link", "language", "pipeline_tag")


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
    evidence = read_json(folder / "evidence.json")
    is_small = len(json.dumps(evidence)) <= MOST_EVIDENCE_BYTES
    return {
        "goal": front["goal"],
        "measured": {key: value for key, value in front["plan"].items() if key != "choice"},
        "nearest": front.get("nearest"),
        "machine": front.get("machine"),
        "evidence": evidence if is_small else None,
    }


def evidence_of_search(plan: Path) -> Path | None:
    """The statistics of a search whose folder is given as a plan; None for a plan's own file."""
    path = plan / "evidence.safetensors"
    return path if plan.is_dir() and search_folder(plan) is not None and path.is_file() else None


def proven_otherwise(plan: Path) -> str | None:
    """A warning for a plan that is applied without the statistics that it was proven with; None for other plans."""
    facts = search_facts(plan)
    if facts is None or facts["nearest"] is None:
        return None
    folder = plan if plan.is_dir() else plan.parent
    return (
        f"{plan}: the plan was proven with statistics of its text, KL {facts['measured']['kl']:.4g}, and without them "
        f"it has {facts['nearest']['kl']:.4g} on the same text; `bitplan quantize --plan {folder}` takes them along"
    )


def has_formats_of(plan: Plan, other: Plan) -> bool:
    """Whether a plan gives every weight and input the format that another does; what stays may be in other types."""
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
    holds_plan: bool,
) -> dict[str, Any]:
    """A certificate of weights quantized by a plan, but for what is known when they are written.

    files       those that hold the weights
    evidence    the statistics by which they were rounded
    holds_plan  the plan is a part of it, for a single file
    """
    search = None
    if evidence is not None and (folder := search_folder(evidence)) is not None:
        search = search_facts(folder) if has_formats_of(plan, Plan.load(folder / PLAN_NAME)) else None
    text = plan.to_json()
    return {
        "document": DOCUMENT,
        "version": VERSION,
        "seal": SEAL,
        "plan_sha256": hashlib.sha256(text.encode()).hexdigest(),
        **({"plan": json.loads(text)} if holds_plan else {}),
        "source": {"name": source.resolve().name, "files": {path.name: sha256_of(path) for path in files}},
        "rounding": {"scale_rule": scale_rule} if evidence is None else {"evidence": sha256_of(evidence)},
        "code": {"sha256": code_sha256(), "versions": code_versions()},
        "machine": hardware(),
        "search": search,
    }


def write_certificate(folder: Path, certificate: Mapping[str, Any]) -> None:
    """Write a folder's certificate, with the hashes of all files that are there."""
    files = {name: sha256_of(folder / name) for name in _covered(folder)}
    text = json.dumps({**certificate, "files": files}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    seal = hashlib.sha256(text.encode()).hexdigest()
    with atomic_file(folder / EVIDENCE_FILE) as file:
        file.write(text.replace(SEAL, seal, 1).encode())


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


_OPTIONAL = ("plan", "files")


def byte_findings(path: Path, certificate: Mapping[str, Any]) -> list[Finding]:
    """Files that are not as they were written: changed, missing or added."""
    holder = path / EVIDENCE_FILE if path.is_dir() else path
    findings = []
    if sealed_sha256(holder, certificate["seal"]) != certificate["seal"]:
        findings.append(Finding("bytes", holder.name, "other bytes than were written; copy or write it again"))
    files = certificate.get("files", {})
    if not path.is_dir():
        return findings
    there = _covered(path)
    for name in natural_order(files):
        if name not in there:
            findings.append(Finding("bytes", name, "missing: the folder had it when it was written; copy it again"))
        elif sha256_of(path / name) != files[name]:
            findings.append(Finding("bytes", name, "other bytes than were written; copy or write the folder again"))
    added = [name for name in there if name not in files and name != CARD]
    return findings + [Finding("bytes", name, "added: the certificate knows nothing of it") for name in added]


def source_findings(certificate: Mapping[str, Any], source: Path, files: Sequence[Path]) -> list[Finding]:
    """Whether a model is the one that was quantized, by the bytes of its weights."""
    wanted, held = certificate["source"]["files"], {path.name: path for path in files}
    if len(wanted) == len(held) == 1:  # a single file may be called otherwise now
        wanted = dict.fromkeys(held, next(iter(wanted.values())))
    differing = [name for name in natural_order(wanted) if name not in held or sha256_of(held[name]) != wanted[name]]
    text = "is missing, or has other bytes than the one that was quantized; give the model that this was made of"
    return [Finding("source", str(source), f"{name} {text}") for name in differing]


# ---- the model card --------------------------------------------------------------------------------------------------


def is_card_of_ours(path: Path) -> bool:
    """Whether a README.md may be replaced: there is none, or bitplan wrote it."""
    try:
        return not path.exists() or _BY_US in read_bytes(path, what="model card").decode(errors="replace")
    except BitplanError:
        return False


def model_card(plan: Plan, certificate: Mapping[str, Any], source: Path, config: Mapping[str, Any]) -> str:
    """README.md for a packed folder: Hugging Face's fields, sizes by format, and what was measured."""
    name = config.get("_name_or_path")
    base = name if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) else _repository(source)
    fields = [f"base_model: {json.dumps(base)}", "base_model_relation: quantized", "library_name: transformers"]
    fields += ["tags:", "- bitplan", "- quantized", *_fields_of(source / CARD)]
    counts, sizes = Counter[str](), Counter[str]()
    for entry in plan.entries.values():
        fmt = entry.stored or entry.choice.format
        counts[fmt], sizes[fmt] = counts[fmt] + 1, sizes[fmt] + entry.nbytes
    total = max(1, sizes.total())
    rows = [
        f"| {fmt} | {counts[fmt]} | {nbytes / 1e6:,.2f} | {nbytes / total:.1%} |" for fmt, nbytes in sizes.most_common()
    ]
    check = f"`bitplan verify FOLDER` holds it against `{EVIDENCE_FILE}`: what it was made of, with what, and where."
    lines = [
        *("---", *fields, "---", "", _BY_US, "", f"# {source.resolve().name}, quantized by bitplan", ""),
        *(f"{sizes.total() / 1e6:,.2f} MB of weights, by the plan in `bitplan_plan.json`.", ""),
        *("| format | tensors | MB | share |", "|---|---|---|---|", *rows, "", *_measured(certificate["search"]), ""),
        *("```python", "import bitplan.transformers", "from transformers import AutoModelForCausalLM", ""),
        *("model = AutoModelForCausalLM.from_pretrained(FOLDER)", "```", "", check, ""),
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


def _repository(source: Path) -> str:
    """A folder of Hugging Face's cache is called after its repository; any other by its own name."""
    cached = next((part for part in reversed(source.resolve().parts) if part.startswith("models--")), None)
    return source.resolve().name if cached is None else "/".join(cached.split("--")[1:])


def _fields_of(card: Path) -> list[str]:
    """The lines of a model's own card that hold for what was made of it, as they are there."""
    if not card.is_file():
        return []
    lines = read_bytes(card, what="model card").decode(errors="replace").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return []
    kept, is_wanted = [], False
    for line in lines[1 : lines.index("---", 1)]:
        if line[:1] not in (" ", "-", "#", ""):
            is_wanted = line.partition(":")[0] in _CARD_FIELDS
        if is_wanted and line.strip():
            kept.append(line)
    return kept
