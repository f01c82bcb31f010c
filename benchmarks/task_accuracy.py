"""Task accuracy of packed models in lm-eval, beside the same weights decoded: the answers must be the same.

The task is made of the text that comes with the package, so that nothing is downloaded: two lines, and four that could
follow, of which one does. A packed folder is run as `--model hf` with bitplan's plug-in and as `--model bitplan`, a
GGUF file as `--model bitplan`, the decoded one (`export --to hf`) as `--model hf`.

python benchmarks/task_accuracy.py --model FOLDER --formats int4_g32 gguf:q4_k_gguf plan.json --questions 200
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import commit, machine, save, shipped_text, versions

from bitplan import quantize_file
from bitplan.files import export_model
from bitplan.plan import Plan

TASK = "bitplan_next_line"
CHOICES = 4
MODELS = {"packed, --model hf": "hf", "packed, --model bitplan": "bitplan", "decoded, --model hf": "hf"}


def write_task(folder: Path, text: str, questions: int) -> None:
    """A task's YAML file, and its questions as JSON lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    chooser = random.Random(0)
    rows = []
    for start in chooser.sample(range(len(lines) - 3), questions):
        wrong = chooser.sample([line for line in lines if line != lines[start + 2]], CHOICES - 1)
        label = chooser.randrange(CHOICES)
        choices = [*wrong[:label], lines[start + 2], *wrong[label:]]
        rows.append({"context": f"{lines[start]}\n{lines[start + 1]}\n", "choices": choices, "label": label})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML


def evaluate(kind: str, folder: Path, tasks: Path) -> dict[str, Any]:
    """Accuracy, and for every question the log-likelihoods of its choices."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import lm_eval

    import bitplan.lm_eval  # noqa: F401 (registers `bitplan`, and the plug-in of transformers)

    result = lm_eval.simple_evaluate(
        model=kind,
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=[TASK],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        batch_size=8,
        bootstrap_iters=0,
        log_samples=True,
        verbosity="ERROR",
    )
    samples = sorted(result["samples"][TASK], key=lambda sample: sample["doc_id"])
    return {
        "accuracy": result["results"][TASK]["acc,none"],
        "choices": [[float(choice[0]) for choice in sample["filtered_resps"]] for sample in samples],
    }


def compare(folders: Mapping[str, Path], tasks: Path) -> dict[str, Any]:
    """A row: accuracies of all three, how many answers differ from the decoded model's, and by how much a choice."""
    answers = {
        name: evaluate(kind, path, tasks)
        for name, kind in MODELS.items()
        if (path := folders[name.partition(",")[0]]).is_dir() or kind == "bitplan"
    }
    decoded = answers["decoded, --model hf"]["choices"]
    row: dict[str, Any] = {"questions": len(decoded)}
    for name, answer in answers.items():
        pairs = list(zip(answer["choices"], decoded, strict=True))
        row[name] = {
            "accuracy": answer["accuracy"],
            "other_answers": sum(ours.index(max(ours)) != theirs.index(max(theirs)) for ours, theirs in pairs),
            "largest_difference": max(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True)),
        }
    return row


def pack(model: Path, fmt: str, folder: Path) -> dict[str, Path]:
    """A model in a format, by a plan (a path), or as a GGUF file (`gguf:FORMAT`), and the same decoded."""
    kind, _, gguf = fmt.partition(":")
    packed = folder / ("packed.gguf" if kind == "gguf" else "packed")
    if kind == "gguf":
        export_model(model, packed, "gguf", gguf)
    else:
        quantize_file(model, packed, Plan.load(fmt) if fmt.endswith(".json") else fmt)
    export_model(packed, folder / "decoded", "hf", "float32")
    return {"packed": packed, "decoded": folder / "decoded"}


def run(model: Path, fmt: str, questions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        write_task(Path(name, "tasks"), shipped_text(), questions)
        row = compare(pack(model, fmt, Path(name)), Path(name, "tasks"))
    return {"format": "plan of a search" if fmt.endswith(".json") else fmt, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--formats", nargs="+", default=["int4_g32", "mxfp4", "int8_row"])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows = []
    for fmt in given.formats:
        rows.append(run(given.model, fmt, given.questions))
        print(json.dumps(rows[-1]), flush=True)
    document = {
        "benchmark": "task_accuracy",
        "machine": machine("cpu"),
        "versions": {**versions(), "lm_eval": importlib.metadata.version("lm_eval")},
        "commit": commit(),
        "model": given.model.name,
        "rows": rows,
    }
    print(save("task_accuracy", document, given.output))
    if any(row[name]["other_answers"] for row in rows for name in MODELS if name in row):
        sys.exit("a packed folder answers otherwise than the decoded one")


if __name__ == "__main__":
    main()
