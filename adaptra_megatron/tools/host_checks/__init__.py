# SPDX-License-Identifier: Apache-2.0
"""What `adaptra doctor` looks at. Each module looks at one thing and returns findings; none prints, none raises."""
