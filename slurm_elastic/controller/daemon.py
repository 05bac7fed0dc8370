"""selasticd: the process around a controller. Signals, the service manager, start and stop.

    selasticd [-D] [-v] [--config FILE] [--print-config]

With several controllers configured it stands by until the lease is its own
(`leader`), and again once it has lost it.

SIGHUP reads the configuration again (settings that cannot change while running are
logged), SIGTERM stops; transitions under way go on at the next start, or are ended by
Slurm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import pwd
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click
import structlog

from slurm_elastic import __version__
from slurm_elastic.config import documentation, schema
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.leader import leader_lease
from slurm_elastic.controller.leader.controller_addresses import own_address
from slurm_elastic.controller.leader.leader_election import LeaderElection, rival
from slurm_elastic.controller.leader.standby_sync import StandbySync, take_over
from slurm_elastic.controller.log_stream import LogStream
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.metrics.metrics_service import serving
from slurm_elastic.controller.metrics.metrics_source import MetricsSource
from slurm_elastic.controller.queries.topology_answer import network_problems
from slurm_elastic.controller.queries.view import View
from slurm_elastic.controller.server.request_dispatcher import RequestRefusedError, Role
from slurm_elastic.controller.server.request_handler import RequestHandler
from slurm_elastic.controller.server.socket_server import Server
from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.controller.wake_up import WakeUp
from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies import policy_protocol
from slurm_elastic.rpc.answers import CheckAnswer
from slurm_elastic.slurm.limits import AccountingLimits
from slurm_elastic.slurm.readers.cluster_reader import ClusterReader
from slurm_elastic.slurm.readers.pyslurm_source import pyslurm_version
from slurm_elastic.slurm.readers.reader_choice import connect
from slurm_elastic.slurm.scontrol import (
    LeaseWrites,
    NotActiveError,
    Scontrol,
    SlurmUnreachableError,
    always,
)

_STDERR = 2
_RETRY_S = 5.0
#: A standby copies the active controller's ledger at every so many looks at the lease.
_COPIES = 4
#: Keys of the configuration that take effect only at the next start.
_FIXED = (
    ("controller", "state_dir"),
    ("controller", "policy"),
    ("controller", "takeover_s"),
    ("sia", "solver"),
    ("slurm", "reader"),
    ("slurm", "reservation_prefix"),
    ("slurm", "timeout_s"),
)


class Daemon:
    """One running selasticd.

    Args:
        path: of the configuration.
        log: structlog logger.
        sentence: returns a reason as the log of a job shows it.
    """

    def __init__(self, path: Path, log: Any, sentence: Callable[[Reason], str] = str) -> None:
        self._path, self._log, self._sentence = path, log, sentence
        self._config = schema.load(path, policies=policy_protocol.known())
        policy_protocol.load(self._config)  # a standby finds an unusable policy now, too
        self._stop, self._reload, self._wakeup = False, False, WakeUp()
        #: Election of the active controller; None: this one is configured alone.
        self._election: LeaderElection | None = None
        self._reader: ClusterReader | None = None
        #: Acts now; None: this daemon stands by or starts.
        self._acting: Controller | None = None
        self._counts = ActivityCounts()

    @property
    def _reading(self) -> str:
        """Reader of slurmctld and the reason for its choice; "" before there is one."""
        return str(self._reader.choice) if self._reader else ""

    def run(self) -> None:
        """Run until SIGTERM.

        Raises:
            ConfigError, LedgerError, OSError: it cannot start.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_signal)
        address = own_address(self._config)
        state = Path(self._config.controller.state_dir)
        ledger = Ledger(state / "ledger.sqlite")
        lock = sole_user(state)
        try:
            with serving(self._config.metrics.listen, lambda: self._metrics(ledger), self._log):
                self._run(ledger, address)
        finally:
            os.close(lock)

    def _run(self, ledger: Ledger, address: str) -> None:
        """Act and stand by until SIGTERM."""
        reader = self._connect()
        if reader is None:
            return
        self._election = self._make_election(reader, address) if address else None
        server = Server(self._config.api, None, self._log, role=self._role, counts=self._counts)
        if self._election:
            self._open(server)
        try:
            while self._stand_by(StandbySync(ledger, self._log)):
                self._act(ledger, reader, server)
        finally:
            _notify("STOPPING=1")
            server.stop()
            ledger.close()

    def _metrics(self, ledger: Ledger) -> MetricsSource:
        """Return the present data of the metrics; called at each scrape."""
        controller = self._acting if self._role().name != "standby" else None
        return MetricsSource(
            view=controller.view if controller else None,
            config=self._config,
            counts=self._counts,
            reader=self._reading.partition(" ")[0],
            ledger_bytes=ledger.size,
            lease_s=self._election.left_s if self._election else 0.0,
            generation=self._election.generation if self._election else 0,
        )

    def _open(self, server: Server) -> None:
        server.start()
        self._say_hello()
        _notify("READY=1")

    def _make_election(self, reader: ClusterReader, address: str) -> LeaderElection:
        takeover_s = self._config.controller.takeover_s
        election = LeaderElection(
            reader=reader,
            writes=LeaseWrites(timeout_s=takeover_s * leader_lease.GAP, account=_account()),
            prefix=self._config.slurm.reservation_prefix,
            address=address,
            takeover_s=takeover_s,
            log=self._log,
        )
        election.lost = self._wakeup.set
        return election

    def _role(self) -> Role:
        if self._election is None:
            return Role(reader=self._reading)
        active = self._election.active_address
        return Role("active" if self._election.holds else "standby", active, self._reading)

    def _stand_by(self, copying: StandbySync) -> bool:
        """Wait until this daemon is to act; return False when it is to stop."""
        last_line, copied = "", float("-inf")
        while self._election and not self._stop:
            self._reload_if_asked(None)
            try:
                if self._election.stand_by():
                    break
                active = self._election.active_address
                line = f"stands by; Active={active or 'none yet'}"
            except SlurmUnreachableError as error:
                line = f"stands by; {error}"
            if line != last_line:
                self._log.info(line)
            last_line = line
            if time.monotonic() - copied > self._election.pause_s * _COPIES:
                copied = time.monotonic()
                copying.follow(
                    self._election.active_address,
                    process=self._election.active_process,
                    seconds=self._election.pause_s,
                )
                copying.forget(self._config.controller)
            self._wakeup.wait(self._election.pause_s)
        return not self._stop

    def _act(self, ledger: Ledger, reader: ClusterReader, server: Server) -> None:
        """Act as the controller until SIGTERM, or until another controller acts."""
        election = self._election
        if election:
            take_over(ledger, election.generation, self._log)
        controller = Controller(
            config=self._config,
            reader=reader,
            scontrol=Scontrol(
                timeout_s=self._config.slurm.timeout_s, right=election.right if election else always
            ),
            ledger=ledger,
            policy=policy_protocol.load(self._config),
            account=_account(),
            log=self._log,
            counts=self._counts,
            wait_after_requeue_s=reader.wait_after_requeue_s,
        )
        with contextlib.suppress(LedgerError):  # each look says what is wrong with it
            reader.remember(controller.store.kept_submissions())
        controller.rival = lambda: self._rival(reader)
        controller.engine.outbox.wake, controller.nudge = server.wake, self._wakeup.set
        reconfigure = lambda: self._reconfigure(controller)  # noqa: E731 - bound to this one
        server.serve(
            RequestHandler(
                controller,
                check=self._check,
                reconfigure=reconfigure,
                log=self._log,
                sentence=self._sentence,
            )
        )
        if election is None:
            self._open(server)
        self._acting = controller
        try:
            while not self._stop:
                self._reload_if_asked(controller)
                with election.working() if election else contextlib.nullcontext():
                    if election:
                        election.right()
                    controller.look()
                self._wakeup.wait(controller.pause())
            controller.stop()
        except NotActiveError:
            server.wake_all()
        finally:
            self._acting = None
            controller.engine.close()
            self._leave(len(controller.engine.live))

    def _leave(self, live: int) -> None:
        """Stop acting: give back the lease, if there is one, and log what is under way."""
        if self._election and not self._stop:
            reason = self._election.drop()
            self._log.error(
                f"no longer active: {reason}; {live} changes are left to the active controller"
            )
            return
        if self._election:
            self._election.give_back()
        self._log.info(f"selasticd stops, {live} changes under way")

    def _rival(self, reader: ClusterReader) -> str:
        """Return the message about another controller that acts here, or ""."""
        if self._election:
            self._election.notice(reader.leases_seen)
            return ""
        return rival(reader.leases_seen)

    def _reload_if_asked(self, controller: Controller | None) -> None:
        if self._reload:
            self._reload = False
            with contextlib.suppress(RequestRefusedError):
                self._reconfigure(controller)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # Without locks: the thread that it interrupts may hold them.
        if number == signal.SIGHUP:
            self._reload = True
        else:
            self._stop = True
        self._wakeup.set()

    def _connect(self) -> ClusterReader | None:
        """Wait for a usable slurm.conf; return None when the daemon is to stop."""
        logged = False
        while not self._stop:
            try:
                reader = connect(
                    reservation_prefix=self._config.slurm.reservation_prefix,
                    limits=AccountingLimits(),
                    setting=self._config.slurm.reader,
                    timeout_s=self._config.slurm.timeout_s,
                )
            except SlurmUnreachableError as error:
                if not logged:
                    self._log.error(f"{error}; tried again every {_RETRY_S:g} s")
                logged = True
                self._wakeup.wait(_RETRY_S)
            else:
                self._reader = reader
                self._log.info(f"slurmctld is read through {self._reading}")
                return reader
        return None

    def _say_hello(self) -> None:
        settings = self._config.controller
        self._log.info(
            f"selasticd {__version__} Mode={settings.mode} Policy={settings.policy} "
            f"Queue={settings.queue} Listen={self._config.api.listen} Config={self._path}"
        )

    def _reconfigure(self, controller: Controller | None) -> str:
        """Apply a changed configuration file; an invalid one changes nothing.

        Raises:
            Refused: it is broken.
        """
        try:
            fresh = schema.load(self._path, policies=policy_protocol.known())
        except schema.ConfigError as error:
            self._log.error(f"configuration not changed: {error}")
            raise RequestRefusedError(f"configuration not changed: {error}") from None
        later = [name for section, name in _FIXED if _differs(fresh, self._config, section, name)]
        if fresh.api != self._config.api:
            later.append("[api]")
        if fresh.metrics != self._config.metrics:
            later.append("[metrics]")
        self._config = fresh
        if controller:
            controller.reconfigure(fresh)
        tail = f"; {', '.join(later)} change at the next start" if later else ""
        text = f"configuration read again: Mode={fresh.controller.mode}{tail}"
        self._log.info(text)
        view = controller.view if controller else None
        problems = (
            network_problems(dataclasses.replace(view, topology=fresh.topology)) if view else []
        )
        for problem in problems:
            self._log.warning(problem)
        return "; ".join([text, *problems])

    def _check(self, view: View) -> dict[str, Any]:
        saves = [(r.checkpoint_s, r.job_id) for r in view.records.values() if r.checkpoint_s]
        slowest, job_id = max(saves, default=(None, 0))
        answer = CheckAnswer(
            version=__version__,
            mode=view.mode,
            account=_account(),
            pyslurm=pyslurm_version(),
            reader=self._reading,
            slowest_save_s=slowest,
            slowest_job=view.snapshot.job[job_id].display_id if job_id in view.snapshot.job else "",
            problems=[
                *(str(n.parameters["error"]) for n in view.notes),
                *network_problems(view),
                *_replaced_records(view),
            ],
        )
        return dict(answer)


def _replaced_records(view: View) -> list[str]:
    """Return a line for `selastic check` if others write AdminComment of elastic jobs."""
    replaced = sum(j.record_replaced and j.state is not JobState.ENDED for j in view.snapshot.jobs)
    if not replaced:
        return []
    which = "an elastic job" if replaced == 1 else f"{replaced} elastic jobs"
    harm = f"the record in AdminComment of {which} was replaced, and one not read before is lost"
    return [f"{harm}; let the site's tool add its text after what AdminComment has"]


def sole_user(state_dir: Path) -> int:
    """Lock the directory of a ledger for this process; return the file descriptor of the lock.

    Raises:
        LedgerError: another process has it.
    """
    lock = os.open(state_dir, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise LedgerError(
            f"{state_dir}: another selasticd has its ledger there; give each its own state_dir"
        ) from None
    except OSError as error:  # a file system that cannot lock directories
        structlog.get_logger("ledger").warning(f"{state_dir} cannot be locked: {error.strerror}")
    return lock


def _account() -> str:
    """Return the Unix name of the account of this process."""
    return pwd.getpwuid(os.geteuid()).pw_name


def _differs(first: schema.Config, second: schema.Config, section: str, name: str) -> bool:
    return bool(getattr(getattr(first, section), name) != getattr(getattr(second, section), name))


def _notify(text: str) -> None:
    """Notify systemd (sd_notify(3)) if it started this process."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        sock.sendall(text.encode())


def _logger(verbose: int) -> Any:
    """Return a logger of one line per event, `level message`; on a terminal with the time."""
    stream: Any = LogStream(_STDERR)
    to_journal = bool(os.environ.get("JOURNAL_STREAM"))
    processors: list[Any] = [structlog.stdlib.add_log_level]
    if not to_journal:
        processors.append(structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%f", utc=False))
    structlog.configure(
        processors=[*processors, _line],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if verbose else logging.INFO
        ),
        logger_factory=lambda *_: structlog.PrintLogger(stream),
    )
    return structlog.get_logger("selasticd")


def _line(_: Any, __: str, event: Any) -> str:
    """Return a text as one printable line."""
    time_ = event.pop("timestamp", "")
    level, text = event.pop("level", "info"), str(event.pop("event", ""))
    fields = " ".join(f"{k}={v}" for k, v in event.items())
    shown = "".join(c if c.isprintable() else "?" for c in f"{text} {fields}".rstrip())
    return f"{time_[:-3]} {level}: {shown}".strip() if time_ else f"{level}: {shown}"


@click.command(context_settings={"help_option_names": ["--help"]})
@click.option(
    "-D",
    "foreground",
    is_flag=True,
    help="Stay in the foreground, as always; for compatibility with daemons of Slurm.",
)
@click.option("-v", "--verbose", count=True, help="Log every call of scontrol.")
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    default=schema.DEFAULT_PATH,
    show_default=True,
    help="Configuration file.",
)
@click.option("--print-config", is_flag=True, help="Print a commented configuration and exit.")
@click.version_option(__version__, prog_name="selasticd")
@click.pass_obj
def main(
    sentence: Callable[[Reason], str] | None,
    *,
    foreground: bool,  # noqa: ARG001
    verbose: int,
    path: Path,
    print_config: bool,
) -> None:
    """Run the controller of slurm-elastic, which decides on elastic jobs and resizes them."""
    if print_config:
        click.echo(documentation.example(), nl=False)
        return
    log = _logger(verbose)
    try:
        Daemon(path, log, sentence or str).run()
    except (SlurmElasticError, OSError) as error:
        click.echo(f"selasticd: {error}", err=True)
        raise SystemExit(1) from None
