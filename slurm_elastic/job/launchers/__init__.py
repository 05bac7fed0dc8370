"""Launchers in the program that esrun starts: torchrun, `accelerate launch` and others."""
