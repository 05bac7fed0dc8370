"""The service leaves selasticd what docs/security.md says, and no more."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.needs import needs

UNIT = Path(__file__).parents[3] / "etc" / "systemd" / "selasticd.service"


def test_the_unit_is_hardened():
    pairs = re.findall(r"^(\w+)=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    lines = {f"{key}={value}" for key, value in pairs}
    assert lines >= {
        "User=selastic", "NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectSystem=strict",
        "ProtectHome=yes", "PrivateTmp=yes", "PrivateDevices=yes", "ProtectKernelModules=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6", "RestrictNamespaces=yes",
        "SystemCallFilter=@system-service", "SystemCallFilter=~@privileged", "UMask=0077",
        "StateDirectoryMode=0700",
    }  # fmt: skip
    assert not [value for key, value in pairs if key.endswith("Paths")], "nothing more is writable"


@needs("systemd-analyze")
def test_systemd_finds_little_exposed():
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=20", UNIT],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "Unknown option" in done.stderr or "unrecognized option" in done.stderr:
        pytest.skip("this systemd does not look at files (--offline)")
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
