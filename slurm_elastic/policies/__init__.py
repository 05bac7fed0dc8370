"""One scheduling policy per file, behind one protocol."""
