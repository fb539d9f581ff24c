"""The compiler of pipeline-parallel training schedules."""
