"""The processes below this one, under the name by which the target half knows them."""

from serving.processes import descendants, is_tracker, kill_descendants, living, members

__all__ = ["descendants", "is_tracker", "kill_descendants", "living", "members"]
