"""Exit codes, and every error of ours: what a person is told, and what the program meets and handles itself.

    UnbrokenError                   what was asked for cannot be done
    ├── ConfigError                 a setting, an option or one of our files cannot be used
    ├── LaunchRefused               `unbroken run` does not start this command
    │   └── JobRunsAlready          another `unbroken run` has this job
    ├── CheckRefused                `unbroken check` was asked for something that does not exist
    │   └── TreeNotFound            there is no captured tree to look at
    ├── ActiveTestsImpossible       no active test can be made on this node, or with these
    ├── JobNotFound                 there is no such job folder, journal or incident
    │   └── JobStarting             it begins: there is no journal yet
    ├── TraceUnreadable             a trace cannot be read, or is none (diagnose.traces)
    ├── RuleNotFound                no proposed rule of this name waits
    ├── RequestUntrusted            a request to drain this node may be somebody else's work
    ├── ControllerUnreachable       no controller answers: nothing was asked
    │   ├── ControllerUnusable      there is one, but it hangs, or we cannot read its token: nothing was asked
    │   └── ControllerSilent        it was asked and did not answer: what was asked may be done all the same
    ├── CommandDenied               the controller answered, and refused
    ├── CommandNotJournalled        the controller has the command; its journal has not, so it may be done yet
    ├── OtherVersion                the journal of a living job is from a version that decided otherwise
    ├── KeeperError                 the node's keeper does not answer
    ├── ModelUnavailable            the language model gave no answer
    └── RunFailed                   a run of the demo or of a bench did not do what it was watched for

    InternalError                   handled where it is met: nobody is told, and there is no exit code
    ├── NoController                there is no address or token yet (agent.link)
    ├── NoTrace                     a rank or a node makes no trace: the answer says why (agent.tracing)
    ├── WebSocketError, FrameError  the other end does not keep to the protocol (agent.link, wire.websocket)
    ├── Unproven, Forged            the other end does not prove that it knows the token (wire.authentication)
    ├── AccessRefused               a token or a user has not the right to ask this (controller.access)
    ├── CopyError                   a checkpoint cannot be copied (mover.copying)
    │   └── SourceChanged           it was changed while it was read
    ├── PeerError                   another node's mover is gone, or refuses (mover.peer)
    ├── Superseded                  a newer controller has taken over (controller.journal)
    └── InvalidTransition           the job was about to break its own table: a defect of ours (job.job)

The text of each is a sentence for a person: what happened, where, and what to do next. `supervisor.cli.main` prints it
and ends with `exit_code`: that is the only place that does. An InternalError stays with the module that raises it.

Three parts may not import this module, and have roots of their own: recovery (PreparationError and NotOurFolder of
`recovery.quarantine`, which the agent reports), diagnosis (PickleError of `diagnosis.pickles`), and what runs inside
the training environment (AgentGone of the shim, CannotAnswer of `supervisor.opinion.local_model`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

NOT_PROVEN: Final = 401
"""HTTP: one end cannot prove to the other that it knows the job's token."""


class ExitCode(IntEnum):
    """What our programs end with; docs/protocol.md lists them for people. A run that ended has its outcome's code."""

    DONE = 0
    NOT_DONE = 1
    """Refused, or a replay that differs."""
    WRONG_USAGE = 2
    UNKNOWN_NODE = 3
    """The command was done, for a node that the job has never had."""
    NOT_KNOWN = 3
    """Of `check`: Nagios' UNKNOWN."""
    NOT_FOUND = 66
    """No such job, incident, rule or file (EX_NOINPUT)."""
    NO_CONTROLLER = 69
    """EX_UNAVAILABLE."""
    OUR_FAULT = 70
    """A part of ours cannot be started (EX_SOFTWARE)."""
    REPLACED = 75
    """The job goes on elsewhere (EX_TEMPFAIL, as after a requeue)."""
    NOT_ALLOWED = 77
    """EX_NOPERM."""
    WRONG_CONFIG = 78
    """EX_CONFIG."""
    INTERRUPTED = 130


class UnbrokenError(Exception):
    """What was asked for cannot be done. The text says why, and what to do."""

    exit_code = ExitCode.NOT_DONE

    def __init__(self, text: str, exit_code: ExitCode | None = None) -> None:
        """`exit_code`: where that of the class does not fit."""
        super().__init__(text)
        if exit_code is not None:
            self.exit_code = exit_code

    def add(self, text: str) -> UnbrokenError:
        """The same error, with another sentence."""
        self.args = (f"{self}. {text}",)
        return self


class ConfigError(UnbrokenError):
    """A value that cannot be used. The text names the key, where it was set, and what would do."""

    exit_code = ExitCode.WRONG_CONFIG


class LaunchRefused(UnbrokenError):
    """The command cannot be supervised as it was given. The text is for the user."""

    exit_code = ExitCode.WRONG_CONFIG


class JobRunsAlready(LaunchRefused):
    """Another `unbroken run` has the lease of this job. The text says which, and what to do."""


class CheckRefused(UnbrokenError):
    """What was asked of `unbroken check` does not exist. The text says what does."""

    exit_code = ExitCode.WRONG_USAGE


class ActiveTestsImpossible(UnbrokenError):
    """No test can be made here, or the nodes do not find each other. The text says why, and what to do."""

    exit_code = ExitCode.NOT_KNOWN


class TreeNotFound(CheckRefused):
    """There is no captured tree in the folder that was named."""

    exit_code = ExitCode.NOT_KNOWN


class JobNotFound(UnbrokenError):
    """There is no such job or incident. The text says what to do."""

    exit_code = ExitCode.NOT_FOUND


class JobStarting(JobNotFound):
    """`unbroken run` has begun this job, and there is no journal yet. The text says since when."""


class RuleNotFound(UnbrokenError):
    """No proposed rule of this name waits. The text says which do."""

    exit_code = ExitCode.NOT_FOUND


class RequestUntrusted(UnbrokenError):
    """Somebody else may have made the request, or the folder that it is in."""


class ControllerUnreachable(UnbrokenError):
    """No controller answers. The text says where it was looked for."""

    exit_code = ExitCode.NO_CONTROLLER


class ControllerUnusable(ControllerUnreachable):
    """There is a controller, but it hangs, or the token that it wants cannot be read. Nothing was asked."""


class ControllerSilent(ControllerUnreachable):
    """The controller was asked, and has not answered. What was asked may be done all the same."""


class CommandDenied(UnbrokenError):
    """The controller answered, and did not do it. The text is the controller's, `status` that of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text, ExitCode.NOT_ALLOWED if status == NOT_PROVEN else ExitCode.NOT_DONE)
        self.status = status


class CommandNotJournalled(UnbrokenError):
    """The journal has not accepted the command so far. It may still be carried out. The text says so."""


class KeeperError(UnbrokenError):
    """The keeper of this node does not answer, or refuses."""


class ModelUnavailable(UnbrokenError):
    """The language model gave no answer. The text says why."""


class OtherVersion(UnbrokenError):
    """The journal of a living job was written by a version that decided otherwise."""

    exit_code = ExitCode.WRONG_CONFIG


class RunFailed(UnbrokenError):
    """A run of the demo or of a bench did not do what it was watched for. The text may end with its last lines."""


class InternalError(Exception):
    """A fault that the program meets and handles itself."""


class AccessRefused(InternalError):
    """Somebody has not the right to ask the controller this. `status` is that of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
