"""Started by test_trackers.py: every job and model once for each tracker, into folders that the environment names.

python tracker_run.py FOLDER      # writes FOLDER/losses.json
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "features")]

from feature_jobs import JOBS, MODELS, logs, trained  # noqa: E402

TRACKERS = ("tensorboard", "trackio", "wandb")


def main(folder: Path) -> None:
    losses = {}
    for tracker in TRACKERS:
        for job in JOBS:
            for model in MODELS:
                name = f"{job}-{model}"
                run = {"report_to": tracker, "run_name": name, "max_steps": 2}
                trainer = trained(job, model, folder / tracker / name, **run)
                losses[f"{tracker}-{name}"] = [log["loss"] for log in logs(trainer)]
                if tracker == "wandb":
                    import wandb

                    wandb.finish()
    (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
