"""Trainings on a simulated accelerator, which reports races and host waits."""
