"""The authenticated TCP socket: requests of jobs and users, checked and dispatched."""
