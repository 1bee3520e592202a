"""From a prompt to the engine core and back to text."""
