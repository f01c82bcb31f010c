"""A fit of trees in a given time beside LightGBM whose settings Optuna searches in the same seconds.

    python benchmarks/trees_budget.py --seconds 20        # needs lightgbm and optuna; a minute and a half

Optuna's sampler has its defaults, and LightGBM stops early on a tenth of the rows; its best settings are fitted to all
rows, with the rounds of the best trial, within the time, too: the search ends when the best trial would just fit in
once more. Both use one thread and the same rows, and seconds are those of CPU time, so that others on the machine cost
neither any.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import trees_tables

from bitplan.trees import BoostedTreesClassifier, budget

Array = np.ndarray[Any, Any]
ROWS = 20_000


def loss(y: Array, proba: Array) -> float:
    chosen = np.where(y > 0, proba[:, 1], proba[:, 0])
    return float(-np.log(np.maximum(chosen, 1e-15)).mean())


def ours(table: trees_tables.Table, seconds: float) -> tuple[Any, dict[str, Any]]:
    model = BoostedTreesClassifier(n_jobs=1).fit(table.train_x, table.train_y, seconds=seconds)
    defaults = BoostedTreesClassifier().get_params()
    chosen = {name: value for name, value in model.search_["settings"].items() if value != defaults[name]}
    return model, {"settings": chosen, "trials": len(model.search_["trials"])}


def lightgbm_by_optuna(table: trees_tables.Table, seconds: float) -> tuple[Any, dict[str, Any]]:
    import lightgbm
    import optuna  # type: ignore[import-not-found]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    end = time.process_time() + seconds
    is_held = np.random.default_rng(0).random(len(table.train_x)) < 0.1
    took: list[tuple[float, float, int]] = []

    def trial(trial: Any) -> float:
        settings = {
            "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
            "num_leaves": trial.suggest_int("num_leaves", 15, 255, log=True),
            "min_child_samples": trial.suggest_int("min_child_samples", 5, 100, log=True),
            "reg_lambda": trial.suggest_float("reg_lambda", 1e-3, 10.0, log=True),
            "colsample_bytree": trial.suggest_float("colsample_bytree", 0.4, 1.0),
        }
        started = time.process_time()
        model = lightgbm.LGBMClassifier(n_estimators=1000, n_jobs=1, verbose=-1, **settings)
        pair = table.train_x[is_held], table.train_y[is_held]
        calls: list[Any] = [lightgbm.early_stopping(30, verbose=False)]
        model.fit(table.train_x[~is_held], table.train_y[~is_held], eval_set=[pair], callbacks=calls)
        value = float(model.best_score_["valid_0"]["binary_logloss"])
        took.append((value, time.process_time() - started, int(model.best_iteration_)))
        best_s = min(took)[1]
        if time.process_time() + best_s + max(one for _, one, _ in took) > end:
            trial.study.stop()
        return value

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(trial, n_trials=1000)
    settings = study.best_params | {"n_estimators": min(took)[2]}
    model = lightgbm.LGBMClassifier(n_jobs=1, verbose=-1, **settings).fit(table.train_x, table.train_y)
    return model, {"settings": settings, "trials": len(took)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    budget.clock = time.process_time
    runs = []
    for seed in range(given.seeds):
        table = trees_tables.made_table(ROWS, trees_tables.FEATURES, seed)
        for name, fit in (("bitplan", ours), ("lightgbm, optuna", lightgbm_by_optuna)):
            started = time.process_time()
            model, found = fit(table, given.seconds)
            taken = time.process_time() - started
            held = loss(table.test_y, model.predict_proba(table.test_x))
            runs.append({"contender": name, "seed": seed, "seconds": taken, "held_out_loss": held, **found})
            print(runs[-1], flush=True)
        plain = BoostedTreesClassifier(n_jobs=1).fit(table.train_x, table.train_y)
        held = loss(table.test_y, plain.predict_proba(table.test_x))
        runs.append({"contender": "bitplan, defaults", "seed": seed, "held_out_loss": held})
        print(runs[-1], flush=True)
    import harness  # beside this file

    document: dict[str, Any] = {"benchmark": "trees_budget", "machine": harness.machine("cpu")}
    document |= {"note": "seconds of CPU time, on two cores that others used at the same time"}
    document |= {"rows": ROWS, "seconds": given.seconds}
    document |= {"versions": harness.versions(), "commit": harness.commit(), "runs": runs}
    print(harness.save("trees_budget", document, given.output))


if __name__ == "__main__":
    main()
