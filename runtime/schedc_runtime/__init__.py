"""The runtime that trains a model with a program compiled by schedc. The only place that imports torch."""
