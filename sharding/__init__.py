"""Placement: meshes and which mesh axis each logical axis goes to. Knows nothing of the engine."""
