"""What people and machines see of the daemon: metrics, health, status, log."""
