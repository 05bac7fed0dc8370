"""The controller's parts in one process, whose changes the caller chooses."""

from __future__ import annotations

import os
import pwd
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from slurm_elastic.config import schema
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.server.request_handler import RequestHandler
from slurm_elastic.controller.server.socket_server import Server
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.policies import policy_protocol
from slurm_elastic.slurm.readers.reader_choice import connect
from slurm_elastic.slurm.scontrol import Scontrol

CONFIG = """\
[controller]
mode = "observe"
[api]
controller = "ctld:7321"
[slurm]
lease_s = 60
"""


@contextmanager
def manual_controller() -> Iterator[Controller]:
    """Run engine, job store and socket server, with a separate ledger and without rounds."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    log = structlog.get_logger()
    settings = schema.parse(CONFIG)
    reader = connect(reservation_prefix=settings.slurm.reservation_prefix)
    controller = Controller(
        config=settings,
        reader=reader,
        scontrol=Scontrol(),
        ledger=Ledger(tempfile.mkdtemp() + "/ledger.sqlite"),
        policy=policy_protocol.load(settings),
        account=pwd.getpwuid(os.geteuid()).pw_name,
        wait_after_requeue_s=reader.wait_after_requeue_s,
        log=log,
    )
    handler = RequestHandler(controller, check=lambda _: {}, reconfigure=str, log=log)
    server = Server(settings.api, handler, log)
    controller.engine.outbox.wake = server.wake
    server.start()
    try:
        yield controller
    finally:
        server.stop()
        controller.engine.close()
