"""Pages from records: one self-contained HTML file from the JSON and JSONL that the other parts wrote."""

from typing import Any

from bitplan.base.names import old_name
from bitplan.report.page import write_report as write_report
from bitplan.report.read_records import TrainingLog
from bitplan.report.trackers import log_records

__all__ = ["TrainingLog", "log_records"]


def __getattr__(name: str) -> Any:
    return old_name(__name__, name)
