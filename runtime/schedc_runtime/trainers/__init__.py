"""Pipelines inside other trainers (Hugging Face, Lightning, Accelerate, torchtitan), and checkpoints for all."""
