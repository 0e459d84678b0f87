"""Run the study: pre-train, perturb, fine-tune, report."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....core.artifacts import write_json
from ....core.console import calm
from ....core.curves import RESULTS, draw, sentences, summary, table
from ....core.inflection import short
from ....core.points import find_points, read_count
from ....core.probe_points import Settings, measure_points
from ....core.run import stored_parameters
from ....registry.errors import TuneryError
from ...sensitivity.commands import study as fine_tune
from ...sensitivity.plan import Plan, make_plan
from . import __doc__ as description
from .pretraining import SIZES, Pretraining, held_out, passes, pretrain

_GAMMAS = (0.5, 1.0, 2.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; return 0, 1 where a checkpoint or a fine-tuning run failed, 2 for what a user can mend."""
    asked = _flags(argv)
    calm()
    try:
        return _study(asked)
    except TuneryError as error:
        print(f"overtraining: {error}", file=sys.stderr)
        return 2


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tunery.benchmarks.studies.overtraining",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    many: dict[str, Any] = {"nargs": "+", "metavar": "N"}
    parser.add_argument("--quick", action="store_true", help="a toy of everything: under a minute, says nothing")
    parser.add_argument(
        "--size", choices=sorted(SIZES), default="1m", help="of the decoder; default 1m: 1.2M parameters"
    )
    parser.add_argument(
        "--budgets", **many, help="tokens: 1M 2M 4M; default: the size's, of 15m to 90m the paper's 4B to 128B"
    )
    parser.add_argument("--data_files", nargs="+", default=[], metavar="PATH", help="text to pre-train on")
    parser.add_argument("--max_documents", type=int, metavar="N", help="of the text; default: all")
    parser.add_argument(
        "--fine_tune_files", metavar="FOLDER", help="train.jsonl with a column text; default: python_docs"
    )
    parser.add_argument(
        "--gammas", **many, type=float, default=list(_GAMMAS), help="of the noise, in initial standard deviations"
    )
    parser.add_argument("--draws", type=int, default=5, help="of the noise")
    parser.add_argument("--learning_rates", **many, type=float, default=[1e-3, 2e-3, 4e-3, 8e-3], help="of fine-tuning")
    parser.add_argument("--seeds", **many, type=int, default=[0, 1, 2], help="of fine-tuning")
    parser.add_argument("--epochs", type=int, default=2, help="of fine-tuning; Table 4 has 4")
    parser.add_argument("--fine_tune_samples", type=int, default=300, help="training rows of fine-tuning")
    parser.add_argument("--eval_samples", type=int, default=100, help="rows of every in-domain evaluation")
    parser.add_argument("--held_out_samples", type=int, default=20, help="documents of every out-of-domain evaluation")
    parser.add_argument("--seed", type=int, default=0, help="of pre-training")
    parser.add_argument("--output_dir", type=Path, default=Path("results/studies/overtraining"), metavar="DIR")
    parser.add_argument(
        "--bf16", dest="pretrain_bf16", action="store_true", default=None, help="mixed precision, of fine-tuning too"
    )
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size", "max_length", "batch_size", "micro_batch_size")
    for name in (*sizes, "learning_rate"):
        kind = float if name == "learning_rate" else int
        parser.add_argument(f"--pretrain_{name}", type=kind, metavar="N", help=f"instead of the size's {name}")
    asked = parser.parse_args(argv)
    if asked.quick:
        quick = {
            "size": "quick",
            "draws": 2,
            "learning_rates": [1e-3, 1e-2],
        }
        vars(asked).update(
            quick,
            max_documents=150,
            seeds=[0],
            gammas=[0.5, 1.0],
            epochs=1,
            fine_tune_samples=16,
            eval_samples=8,
            held_out_samples=8,
        )
    return asked


def _study(asked: argparse.Namespace) -> int:
    changes = {
        name.removeprefix("pretrain_"): value
        for name, value in vars(asked).items()
        if name.startswith("pretrain_") and value is not None
    }
    size = dataclasses.replace(SIZES[asked.size], **changes)
    pretraining = Pretraining(
        size=size,
        budgets=[round(read_count(text)) for text in asked.budgets or ()] or size.budgets,
        sources=asked.data_files,
        max_documents=asked.max_documents,
        seed=asked.seed,
    )
    folder: Path = asked.output_dir
    runs = pretrain(pretraining, folder, lambda line: print(line, file=sys.stderr))
    points = find_points([str(run) for run in runs])
    held = held_out(pretraining, folder, asked.held_out_samples)

    probe = {"name": "gaussian", "gammas": asked.gammas, "draws": asked.draws}
    settings = Settings(probe=probe, data=held, output_dir=folder / "gaussian", seed=asked.seed, batch_size=32)
    measured = list(measure_points(points, settings))
    write_json(folder / "gaussian" / RESULTS, summary(measured))
    draw(measured, folder / "gaussian" / "gaussian.png", "Gaussian noise in the weights")
    for line in sentences(measured):
        print(line)

    plan = _plan(asked, pretraining, runs, held)
    analysis, failed = fine_tune(plan, folder / "fine_tuning")
    failures = {one.point.label: one.error for one in measured if one.error} | dict(failed)
    parameters = stored_parameters(runs[0])
    made = (
        f"{parameters:,} parameters, pre-trained on {', '.join(map(short, pretraining.budgets))} tokens "
        f"({', '.join(f'{budget / parameters:.2g}' for budget in pretraining.budgets)} a parameter; the paper's 30M model has "
        "133 to 4,267), each run with a cosine to zero. Perplexity on text held out of pre-training."
    )
    repeated = _repeated(runs)
    if repeated:
        print(repeated)
    said = [
        "# Overtraining, on a small scale",
        f"{made} {repeated}".strip(),
        "## Gaussian noise in the weights",
        _markdown(table(measured)),
        *(f"- {line}" for line in sentences(measured)),
        "![Gaussian](gaussian/gaussian.png)",
        "## Fine-tuning",
        _markdown(analysis.table() if analysis else []),
        *(f"- {line}" for line in (analysis.sentences() if analysis else ["nothing is complete"])),
        *(f"![{path.stem}](fine_tuning/{path.name})" for path in sorted((folder / "fine_tuning").glob("*.png"))),
        *(f"- failed: {name}: {error}" for name, error in failures.items()),
    ]
    temporary = folder / ".report.md"
    temporary.write_text("\n\n".join(said).replace("\n\n- ", "\n- ") + "\n", encoding="utf-8")
    temporary.replace(folder / "report.md")
    print(f"{folder}/report.md says what the curves show")
    return int(bool(failures))


def _plan(asked: argparse.Namespace, pretraining: Pretraining, runs: Sequence[Path], held: Mapping[str, Any]) -> Plan:
    """Return the fine-tuning: Table 4's AdamW, cosine with 10 % warmup and no weight decay."""
    source = {"data_files": asked.fine_tune_files} if asked.fine_tune_files else {"dataset_name": "python_docs"}
    if not asked.fine_tune_files:
        source["test_split"] = "validation"
    return make_plan(
        {
            "name": "fine_tuning",
            "models": [str(run) for run in runs],
            "learning_rates": asked.learning_rates,
            "seeds": asked.seeds,
            "in_domain": {
                **source,
                "task_kind": "causal_lm",
                "text_columns": ["text"],
                "max_length": pretraining.size.max_length,
                "max_train_samples": asked.fine_tune_samples,
                "max_eval_samples": asked.eval_samples,
            },
            "out_of_domain": dict(held),
            "training": {
                "per_device_train_batch_size": min(16, pretraining.size.batch_size),
                "per_device_eval_batch_size": 32,
                "num_train_epochs": asked.epochs,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 0.1,
                "weight_decay": 0.0,
                "eval_strategy": "no",
                **({"bf16": True} if pretraining.size.bf16 else {}),
            },
        }
    )


def _repeated(runs: Sequence[Path]) -> str:
    """Return which runs have read their text more than once, in words; the paper's had enough text."""
    often = [f"{passes(run):.3g} times on {run.name.removeprefix('tokens')}" for run in runs if passes(run) > 1]
    return f"Text was repeated: it was read {', '.join(often)} tokens." if often else ""


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    names = [name for name in rows[0] if name != "model"]
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
