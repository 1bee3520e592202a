"""Models: from token ids to logits."""
