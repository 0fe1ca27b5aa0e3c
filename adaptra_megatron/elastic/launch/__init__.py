# SPDX-License-Identifier: Apache-2.0
"""`adaptra launch`: starts the ranks of a job on each host, and keeps those that live when others die."""
