"""Files that are written completely or not at all, parts of a folder, and progress bars."""
