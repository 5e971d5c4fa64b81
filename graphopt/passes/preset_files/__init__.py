"""Recipes that ship with graphopt, one YAML file each."""
