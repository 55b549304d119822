"""Requests, scheduling, the step, sampling."""
