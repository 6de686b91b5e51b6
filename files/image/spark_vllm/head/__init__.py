"""The INT8 LM head: method, kernels, block sizes, choice by measurement."""
