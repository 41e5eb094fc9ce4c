"""What an autoscaling policy would have done to a recorded load, by the controller's own code."""
