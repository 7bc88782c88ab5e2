"""Recipes: one YAML file in, one folder of records, adapters and a report out. The command is `forklora`."""
