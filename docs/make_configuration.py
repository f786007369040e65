"""Writes docs/configuration.md from the code: `python docs/make_configuration.py`. A test checks that it is up to date."""

from __future__ import annotations

from pathlib import Path

from supervisor.cli.render import setting
from supervisor.config import ENVIRONMENT, FLAGS, OTHER_VARIABLES, Knob, knobs

PAGE = Path(__file__).with_name("configuration.md")

HEAD = """# Settings

<!-- Made by docs/make_configuration.py from supervisor/config.py: change those, and run `python docs/make_configuration.py`. -->

Every default is right for one machine: nothing has to be set. `unbroken config` prints each value and where it came from, for the folder
and the environment in which it is called; it does not ask a running job.

## Which value counts

The later one wins:

1. the default;
2. `unbroken.toml` in the working folder;
3. the file that `UNBROKEN_CONFIG` names;
4. the variable in the environment;
5. the option of `unbroken run`.

A file has a table for each group of keys. An unknown key, or a value that cannot be used, ends the program with code 78 before anything
is started; the message names the key and the file, variable or option.

In the environment a switch is `true` or `false`, or `1` or `0`. An empty variable counts as not set.

A complete file. What you leave out keeps its default:

```toml
[run]
name = "llm-7b"
job_dir = "/scratch/llm/jobs/llm-7b"      # on a file system that all nodes share
mode = "recommend"                        # ask before acting
checkpoint_dirs = ["/scratch/llm/ckpt"]
spares = 1
max_restarts = 20
wait_for_nodes_s = 1800

[checkpoint]
publish_to = "/shared/llm/ckpt"           # checkpoint_dirs is a folder on each node's own disk then

[hang]
patience_s = 1800                         # unproven silence: restart after half an hour

[loss]
guard = "recommend"

[swap]
mode = "recommend"

[controller]
listen = "0.0.0.0:7461"

[metrics]
targets_dir = "/shared/unbroken/targets"

[scheduler]
name = "slurm"

[ledger]
folder = "/shared/unbroken/ledger"        # one for all jobs of the cluster

[notify]
to = ["/home/ann/.config/slack-webhook", "mailto:ann@example.org"]

[opinion]
backend = "endpoint"
url = "https://models.example.org/v1"
model = "small-model"
key_file = "/home/ann/.config/model.key"
```

`unbroken config` in the folder of that file shows what it sets.

## Options that no file has

| option of `unbroken run` | |
| --- | --- |
| `--spare` | this node stays idle until it is needed |
| `--nproc-per-node N` | for `-- python train.py` |
| `--json` | the last line of the run is its outcome as JSON |

## Which node's value counts

Each node reads its own files, environment and options. The **scope** says what becomes of them:

| scope | |
| --- | --- |
| job | the first node that joins a new job gives the value for all nodes, until the job has ended |
| node | each node uses its own. Give all nodes the same file, or the same command |
| controller | the value of the node that starts the controller: the first one |

With scope *job*, three cases need a word:

- **Another node asks for something else.** It joins all the same, and the first node's value holds. `unbroken timeline` says so.
- **The scheduler starts the job again.** The first node that joins gives the values anew. `run.mode` and `run.max_restarts` stay as they were.
- **`unbroken run` starts an ended job again.** The first node that joins gives all values anew.

`mode` can be changed while the job runs (`unbroken mode`). All else needs a new start.
"""

TABLES = {
    "run": "",
    "checkpoint": "Checkpoints on the nodes' own disks: "
    "[checkpoints.md](checkpoints.md#checkpoints-on-the-nodes-own-disks).",
    "swap": "What is done about a node that degrades: [swaps.md](swaps.md).",
    "loss": "What is done about a loss that spikes, diverges or stays NaN: [loss.md](loss.md).",
    "hang": "How long unproven silence is tolerated. Proven hangs do not wait for it: [hangs.md](hangs.md).",
    "controller": "",
    "metrics": "[metrics.md](metrics.md) says what is told, and where Prometheus finds it.",
    "scheduler": "",
    "ledger": "What all jobs of a cluster know of its nodes: [ledger.md](ledger.md).",
    "notify": "Messages to people, where there is no Alertmanager ([runbook](runbook.md#who-is-told)).",
    "opinion": "Which language model is asked about unsure verdicts: [opinion.md](opinion.md).",
}

FLAG_ARGUMENTS = {"hang.patience_s": " S", "hang.off": " off"}

TAIL = """
## Other variables

No file sets these:

| variable | who sets it | |
| --- | --- | --- |
"""

END = """
`unbroken run` writes the node's settings, with absolute paths, to `node.json` of the local folder. The agent and the controller of the node read
them there.

What a site says about its nodes for all jobs has a file of its own: [the site file](runbook.md#the-site-file).
"""


def row(knob: Knob) -> str:
    flag = f"`{FLAGS[knob.key]}{FLAG_ARGUMENTS.get(knob.key, '')}`" if knob.key in FLAGS else ""
    flag += " (repeatable)" if isinstance(knob.default, tuple) and flag else ""
    variable = f"`{ENVIRONMENT[knob.key]}`" if knob.key in ENVIRONMENT else ""
    default = knob.default_text or f"`{setting(knob.default)}`"
    what = f"{knob.what} See [{knob.see.partition('#')[0]}]({knob.see})." if knob.see else knob.what
    return f"| `{knob.key}` | {flag} | {variable} | {default} | {knob.scope} | {what} |\n"


def page() -> str:
    text = HEAD
    for table, about in TABLES.items():
        text += f"\n## `[{table}]`\n\n" + (f"{about}\n\n" if about else "")
        text += "| key | flag | variable | default | scope | |\n| --- | --- | --- | --- | --- | --- |\n"
        text += "".join(row(knob) for key, knob in knobs().items() if key.partition(".")[0] == table)
    text += TAIL + "".join(f"| `{name}` | {who} | {what} |\n" for name, (who, what) in OTHER_VARIABLES.items())
    return text + END


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
