"""What the job asks others to do: orders to the scheduler, a model's opinion. Answers come back as events.

Each errand is a task of its own with a deadline: nothing in the controller waits for one.
"""
