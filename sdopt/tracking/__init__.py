"""MLflow as a projection of `result.json`: the only room that knows MLflow."""
