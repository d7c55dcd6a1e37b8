"""Proofs and measurements, for users, that an acceptance rule or a drafter leaves the law alone."""

from jspec.certify.law import law, laws
from jspec.certify.report import Finding, Report

__all__ = ["Finding", "Report", "law", "laws"]
