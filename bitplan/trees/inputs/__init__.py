"""What users hand to the estimators, made into numbers: settings by feature, categories, weights of classes."""
