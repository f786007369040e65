"""Writes docs/configuration.md from the code: `python docs/make_configuration.py`. A test checks that it is up to date."""

from __future__ import annotations

from pathlib import Path

from supervisor.cli.render import setting
from supervisor.config import ENVIRONMENT, FLAGS, OTHER_VARIABLES, PASSED_ON, Knob, knobs

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

    [run]
    mode = "recommend"
    checkpoint_dirs = ["/scratch/llm/ckpt"]

    [hang]
    patience_s = 1800

In the environment a switch is `true` or `false`, or `1` or `0`. An empty variable counts as not set.

## Which node's value counts

Each node reads its own files, environment and options. The **scope** says what becomes of them:

| scope | |
| --- | --- |
| job | the first node that joins a new job gives the value for all nodes; it holds until the job has ended. A node that asks for something else joins all the same, and `unbroken timeline` says so. When the scheduler has started the job again, the first node gives the values anew, but for `run.mode` and `run.max_restarts`, which stay; when `unbroken run` starts an ended job again, all of them |
| node | each node uses its own. Give all nodes the same file, or the same command |
| controller | the value of the node that starts the controller: the first one |

`mode` can be changed while the job runs (`unbroken mode`). All else needs a new start.
"""

TABLES = {
    "run": "",
    "hang": "When a silence is acted on that nothing proves to be a hang. Proven hangs do not wait for it: [hangs.md](hangs.md).",
    "controller": "",
    "metrics": "[metrics.md](metrics.md) says what is told, and where Prometheus finds it.",
    "scheduler": "",
    "opinion": "Which language model is asked about unsure verdicts: [opinion.md](opinion.md).",
}

FLAG_ARGUMENTS = {"hang.patience_s": " S", "hang.off": " off"}

TAIL = """
## Options of one start

`--spare` (this node stays idle until it is needed), `--nproc-per-node N` (for `-- python train.py`), `--json`: they are no settings.

## Other variables

No file sets these:

| variable | who sets it | |
| --- | --- | --- |
"""

END = """
`unbroken run` passes these settings on to the controller and the agent of the node in their environment, because each is a process of
its own: {passed_on}. All others are in `node.json` of the local folder, or on the controller's command line.

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
    return text + END.format(passed_on=", ".join(f"`{key}`" for key in PASSED_ON))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
