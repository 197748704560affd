"""How a rank's reports reach the controller."""
