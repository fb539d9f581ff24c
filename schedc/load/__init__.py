"""Finds and reads schedules: the shipped library, files, and orders that a policy chose and a file keeps."""
