/*
 * SPANK plugin: gives sbatch, salloc and srun the option --elastic and hands its value to
 * job_submit.lua, which decides what becomes of it. Nothing happens on compute nodes.
 */

#include "directive.h"

#include <slurm/spank.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

SPANK_PLUGIN(elastic, 1)

/* As for sbatch's own options, the command line beats the environment, and that the script. */
#define ENVIRONMENT "SLURM_ELASTIC"
#define OPEN_MODE "SBATCH_OPEN_MODE"

/*
 * Inside an elastic job slurmd sets these, and sbatch and salloc read the first as if --elastic
 * were given again: a job submitted by an elastic job would become elastic unasked.
 */
static const char *const inherited[] = {
	"SLURM_SPANK__SLURM_SPANK_OPTION_elastic_elastic",
	"_SLURM_SPANK_OPTION_elastic_elastic",
	"SLURM_SPANK_ELASTIC",
};

/* --elastic as checked; empty when not given. */
static char directive[DIRECTIVE_MAX_BYTES + 1];

/* Whether the command line gives it; it is read last. */
static bool on_command_line;

/* -1: not looked at yet, 0: the user's own or not sbatch, 1: ours, removed again. */
static int open_mode_is_ours = -1;

static int on_elastic(int value, const char *text, int remote);

static struct spank_option elastic_option = {
	.name = "elastic",
	.arginfo = "MIN-MAX[,key=value...]",
	.usage = "[elastic] run on MIN to MAX GPUs, as the cluster allows; keys: types=a100:v100,"
		 " batch=256-4096, parallel=data|pipeline|hybrid, freeze=off|auto,"
		 " max-penalty=0.5%, notice=SECONDS, unit=GPUS",
	.has_arg = 1,
	.val = 0,
	.cb = on_elastic,
};

/*
 * An elastic job restarts in the middle of its output file. sbatch reads the script's options,
 * then the environment, then the command line: it obeys what is set here before the second, and
 * the user's --open-mode on the command line wins.
 */
static void append_output(void)
{
	if (open_mode_is_ours != -1 || spank_context() != S_CTX_ALLOCATOR)
		return;
	open_mode_is_ours = getenv(OPEN_MODE) == NULL && setenv(OPEN_MODE, "append", 0) == 0;
}

/* Looks for --elastic or an abbreviation before options are read; --elastic among the arguments of
 * the user's own program is taken for it too. */
static bool find_on_command_line(void)
{
	static const char option[] = "--elastic";
	FILE *arguments = fopen("/proc/self/cmdline", "re");
	size_t matched = 0;
	bool found = false;
	int c;

	if (arguments == NULL)
		return (false);
	while (!found && (c = getc(arguments)) != EOF) {
		if ((c == '\0' || c == '=') && matched >= strlen("--el") &&
		    matched <= strlen(option))
			found = true;
		else if (c == '\0')
			matched = 0;
		else if (matched <= strlen(option))
			matched = c == option[matched] ? matched + 1 : sizeof(option);
	}
	fclose(arguments);
	return (found);
}

static int on_elastic(int value, const char *text, int remote)
{
	struct directive_error error;
	char shown[DIRECTIVE_MAX_BYTES + 8];

	(void)value;
	if (remote)
		return (0);
	if (text == NULL)
		text = "";
	directive_printable(text, shown, sizeof(shown));
	if (directive_check(text, &error) < 0) {
		slurm_error("elastic: --elastic=%s: %s", shown, error.reason);
		goto fail;
	}
	if (directive[0] != '\0' && strcmp(directive, text) != 0 && !on_command_line) {
		slurm_error("elastic: --elastic=%s: differs from --elastic=%s given before;"
			    " keep one",
			    shown, directive);
		goto fail;
	}
	snprintf(directive, sizeof(directive), "%s", text);
	append_output();
	return (0);

fail:
	return (-1);
}

static const char *from_environment(void)
{
	const char *text = getenv(ENVIRONMENT);

	return (text != NULL && text[0] != '\0' ? text : NULL);
}

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
		for (size_t i = 0; i < sizeof(inherited) / sizeof(inherited[0]); ++i)
			unsetenv(inherited[i]);
		on_command_line = find_on_command_line();
		if (on_command_line || from_environment() != NULL)
			append_output();
		break;
	case S_CTX_LOCAL:
		on_command_line = find_on_command_line();
		break;
	case S_CTX_REMOTE:
		break;
	default:
		return (0);
	}
	if (spank_option_register(sp, &elastic_option) != ESPANK_SUCCESS) {
		slurm_error("elastic: cannot register --elastic; is the plugin listed twice?");
		goto fail;
	}
	return (0);

fail:
	return (-1);
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	char shown[DIRECTIVE_MAX_BYTES + 8] = "";
	const char *text = directive;

	(void)ac;
	(void)av;
	if (open_mode_is_ours == 1)
		unsetenv(OPEN_MODE);
	if (spank_context() != S_CTX_ALLOCATOR && spank_context() != S_CTX_LOCAL)
		return (0);
	/* Faults in it are left to job_submit.lua: an error here would not stop sbatch. */
	if (!on_command_line && from_environment() != NULL) {
		directive_printable(from_environment(), shown, sizeof(shown));
		text = shown;
	}
	if (text[0] == '\0')
		return (0);
	if (spank_job_control_setenv(sp, "ELASTIC", text, 1) != ESPANK_SUCCESS) {
		slurm_error("elastic: cannot pass --elastic=%s on to slurmctld", text);
		goto fail;
	}
	return (0);

fail:
	return (-1);
}
