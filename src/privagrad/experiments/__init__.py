"""Problems, figures and demonstrations."""
