"""Prefect: runs as flows, servers, deployments and schedules."""
