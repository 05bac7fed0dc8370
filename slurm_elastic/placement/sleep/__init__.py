"""How many nodes shall be awake, and which may sleep; pure."""
