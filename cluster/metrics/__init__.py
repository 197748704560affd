"""Prometheus and Grafana for raypp's metrics."""
