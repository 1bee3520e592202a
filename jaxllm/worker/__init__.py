"""The device side: from a SchedulerOutput to token ids."""
