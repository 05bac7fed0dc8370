"""The tables of the ledger, version by version."""

from __future__ import annotations

from slurm_elastic.controller.state import retention

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs (
    key TEXT PRIMARY KEY, job_id INTEGER NOT NULL, seen REAL NOT NULL, record TEXT NOT NULL);
CREATE TABLE transitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, job_id INTEGER NOT NULL, key TEXT NOT NULL,
    state TEXT NOT NULL, live INTEGER NOT NULL, updated REAL NOT NULL, body TEXT NOT NULL);
CREATE INDEX transitions_live ON transitions (live) WHERE live = 1;
CREATE INDEX transitions_job ON transitions (job_id, id);
CREATE TABLE segments (
    key TEXT NOT NULL, job_id INTEGER NOT NULL, user TEXT NOT NULL, name TEXT NOT NULL,
    run INTEGER NOT NULL, gpu_type TEXT NOT NULL, gpus INTEGER NOT NULL, nodes TEXT NOT NULL,
    start REAL NOT NULL, end REAL, PRIMARY KEY (key, run, start));
CREATE INDEX segments_open ON segments (end) WHERE end IS NULL;
"""
_APPLICATIONS = """
CREATE TABLE applications (
    user TEXT NOT NULL, name TEXT NOT NULL, stated TEXT NOT NULL, seen REAL NOT NULL,
    body TEXT NOT NULL, PRIMARY KEY (user, name, stated));
CREATE INDEX applications_seen ON applications (user, seen);
"""
_PROFILES = """
CREATE TABLE profiles (
    user TEXT NOT NULL, name TEXT NOT NULL, stated TEXT NOT NULL, seen REAL NOT NULL,
    body TEXT NOT NULL, PRIMARY KEY (user, name, stated));
CREATE INDEX profiles_seen ON profiles (user, seen);
"""
#: Seconds that Slurm's accounting counts for a segment; NULL: not known yet.
_SETTLED = "ALTER TABLE segments ADD COLUMN seconds INTEGER;"
#: Statements of each version of the schema, which add to those before.
VERSIONS = (_SCHEMA, _APPLICATIONS, _PROFILES, retention.SCHEMA, _SETTLED)
VERSION = len(VERSIONS)
