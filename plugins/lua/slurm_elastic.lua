-- Handling of --elastic in slurmctld at submission: checks the directive, gives the job a shape to
-- start in, and records directive and submitted shape in AdminComment, which users cannot change.
-- docs/directive.md describes the record and the settings.
--
-- An internal error is logged and the job runs unmanaged. Nothing here waits, as slurmctld holds
-- its locks meanwhile.

local cluster = require("slurm_elastic_cluster")
local directive = require("slurm_elastic_directive")
local shape = require("slurm_elastic_shape")

local M = {}

-- Prefix of the controller's reservations.
local RESERVATION_PREFIX = "selastic_"
local MAX_RECORD_BYTES = 65536
-- Longer node lists of users are not expanded.
local MAX_USER_NODES = 5000
local MAX_USER_BYTES = 16384
-- Messages are cut at this length.
local MAX_MESSAGE_BYTES = 1024
local UNSET_32 = 4294967294

local refuse = shape.refuse

-- Settings ---------------------------------------------------------------------------------------

local function uid_of(account, passwd)
	if type(account) == "number" then
		return account
	end
	for name, uid in ("\n" .. (passwd or "")):gmatch("\n([^:\n]*):[^:\n]*:(%d+):") do
		if name == account then
			return tonumber(uid)
		end
	end
end

-- Return the folder of slurm.conf: the first one that is searched for modules and has it, which is
-- that of job_submit.lua; packages put the modules elsewhere.
local function slurm_folder()
	for folder in package.path:gmatch("([^;]*/)%?%.lua") do
		if cluster.read_file(folder .. "slurm.conf") then
			return folder
		end
	end
	return debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
end

-- Read slurm_elastic_conf.lua beside slurm.conf, which returns a table; all keys are optional.
local function load_settings()
	local here = slurm_folder()
	local path = here .. "slurm_elastic_conf.lua"
	local settings = {}
	if cluster.read_file(path) then
		settings = dofile(path)
		assert(type(settings) == "table", path .. " must return a table")
	end
	settings.nodes = settings.gpus_per_node and {} or cluster.read(here)
	settings.cluster_name = cluster.cluster_name(here)
	settings.controller_uid =
		uid_of(settings.controller or "selastic", cluster.read_file("/etc/passwd"))
	return settings
end

-- By node list of a partition, so that users cannot make it grow.
local known_sizes = {}
local function list_sizes(list)
	if not known_sizes[list] then
		known_sizes[list] = cluster.sizes(M.settings.nodes, list)
	end
	return known_sizes[list]
end

local known_inventories = {}
local function list_inventory(list)
	if not known_inventories[list] then
		known_inventories[list] = cluster.inventory(M.settings.nodes, list)
	end
	return known_inventories[list]
end

-- Return the node lists of the job's partitions, or of the default one; {"ALL"} and false if none is
-- known.
local function partition_lists(job, part_list)
	local wanted, lists = {}, {}
	for name in (job.partition or ""):gmatch("[^,]+") do
		wanted[name] = true
	end
	for name, part in pairs(part_list) do
		if part.nodes and (wanted[name] or not next(wanted) and part.flag_default == 1) then
			lists[#lists + 1] = part.nodes
		end
	end
	return #lists > 0 and lists or { "ALL" }, #lists > 0
end

-- Return the GPUs per node by type in these node lists.
local function partition_sizes(lists)
	if M.settings.gpus_per_node then
		return M.settings.gpus_per_node
	end
	local sizes = {}
	for _, list in ipairs(lists) do
		cluster.narrow(sizes, list_sizes(list))
	end
	return sizes
end

-- Return the nodes in these lists, one inventory for each, none if the site gives their GPUs itself;
-- and whether all nodes are known.
local function partition_inventories(lists)
	local inventories, complete = {}, not M.settings.gpus_per_node
	for i, list in ipairs(complete and lists or {}) do
		inventories[i] = list_inventory(list)
		complete = complete and inventories[i].complete
	end
	return inventories, complete
end

-- Return the names of the nodes that the job excludes; none where these are too many.
local function excluded_nodes(job)
	local list, excluded = job.exc_nodes or "", {}
	if list ~= "" and #list <= MAX_USER_BYTES then
		local sound, names = pcall(cluster.expand, list, MAX_USER_NODES)
		for _, name in ipairs(sound and names or {}) do
			excluded[name] = true
		end
	end
	return excluded
end

-- Return the same for the nodes that the job names; nil if it names none or they are unknown.
local function named_sizes(job)
	local list = job.req_nodes or ""
	if list ~= "" and #list <= MAX_USER_BYTES then
		local sound, sizes = pcall(cluster.sizes, M.settings.nodes, list, MAX_USER_NODES)
		return sound and next(sizes) and sizes or nil
	end
end

-- The record -------------------------------------------------------------------------------------

-- Return a JSON string in ASCII: bytes outside printable ASCII become \u00XX.
local function json_string(text)
	local escaped = text:gsub('[%c"\\\127-\255]', function(char)
		return string.format("\\u%04x", char:byte())
	end)
	return '"' .. escaped .. '"'
end

local function json_object(fields)
	local names, members = {}, {}
	for name in pairs(fields) do
		names[#names + 1] = name
	end
	table.sort(names)
	for i, name in ipairs(names) do
		local value = fields[name]
		local text = type(value) == "table" and json_object(value)
			or type(value) == "number" and string.format("%.0f", value)
			or json_string(value)
		members[i] = json_string(name) .. ":" .. text
	end
	return "{" .. table.concat(members, ",") .. "}"
end

local function is_ours(admin_comment)
	local text = (admin_comment or ""):gsub('^(%s*{%s*)"at"%s*:%s*%d+%s*,%s*', "%1")
	return text:match('^%s*{%s*"elastic"') ~= nil or text:match('^%s*{%s*"companion"') ~= nil
end

-- Return the record of a job that esrun submits for another one, from its comment; nil for others.
-- The record gives no rights: the controller asks the other job's esrun for it.
local function companion_record(job)
	local base, run, change = (job.comment or ""):match("^selastic:companion:(%d+):(%d+):(%d+)$")
	if base and #base <= 10 and #run <= 10 and #change <= 15 then
		return json_object({ v = 1, companion = { base = tonumber(base), run = tonumber(run),
			change = tonumber(change) } })
	end
end

-- Submission -------------------------------------------------------------------------------------

-- Return the directive as given, and the rest of the comment if it was given there.
local function requested(job)
	for _, setting in pairs(job.spank_job_env or {}) do
		local text = setting:match("^ELASTIC=(.*)$")
		if text then
			return text, nil
		end
	end
	return (job.comment or ""):match("^elastic:(%S+)%s*(.*)$")
end

local function summary(d, gpus, gpu_type, note, managed)
	local count = shape.span_of(d)
	local types = #d.types > 0 and ", " .. table.concat(d.types, " before ") or ""
	local start = string.format("%d%s%s", gpus, gpu_type and " " .. gpu_type or "", note)
	if managed then
		return string.format("elastic: %s%s; starts at %s."
			.. " `selastic explain JOBID` shows what is done and why", count, types, start)
	end
	return string.format("elastic: only batch jobs can be resized: this one stays at %s", start)
end

local function check_reservation(job, uid)
	if uid == 0 or uid == M.settings.controller_uid then
		return
	end
	local text = job.reservation or ""
	if #text > MAX_RECORD_BYTES then
		refuse("the reservations take %d bytes: expected at most %d; shorten the list", #text,
			MAX_RECORD_BYTES)
	end
	for name in text:gmatch("[^,%s]+") do
		if name:sub(1, #RESERVATION_PREFIX) == RESERVATION_PREFIX then
			refuse("reservation %s belongs to the elastic controller: leave it out", name)
		end
	end
end

-- Refuse more than can be handled under slurmctld's locks and read by the controller.
local function check_bytes(count)
	if count > MAX_RECORD_BYTES then
		refuse("the job's constraints take %d bytes, more than the %d that can be recorded:"
			.. " shorten node lists or dependencies", count, MAX_RECORD_BYTES)
	end
end

-- Return the fields to change and the line for the user; no line without a directive.
local function plan(job, part_list)
	local text, comment = requested(job)
	if not text then
		local record = companion_record(job)
		return { admin_comment = record, clusters = record and M.settings.cluster_name }, nil
	end
	local d, fault = directive.parse(text)
	if not d then
		refuse("%s", fault.message)
	elseif job.het_job_offset and job.het_job_offset ~= UNSET_32 then
		refuse("heterogeneous jobs cannot be resized: leave out --elastic or the components")
	end
	check_bytes(shape.bytes(job))
	local managed = (job.script or "") ~= ""
	if managed and job.requeue == 0 then
		refuse("an elastic job is resized by requeueing it: leave out --no-requeue")
	end
	local expedite = slurm.EXPEDITED_REQUEUE -- from Slurm 25.11 on
	if managed and expedite and math.floor((job.bitflags or 0) / expedite) % 2 == 1 then
		refuse("--requeue=expedite starts a job again before it has its new size: leave out =expedite")
	end
	if managed then
		shape.check_form(job)
	end
	local lists, known = partition_lists(job, part_list)
	local inventories, complete = partition_inventories(lists)
	local sizes = partition_sizes(lists)
	local changes, gpus, gpu_type, note = shape.start(d, job, {
		partition = sizes,
		gpus_per_node = named_sizes(job) or sizes,
		default_gpus_per_node = M.settings.default_gpus_per_node,
		stock = shape.stock_of(inventories, excluded_nodes(job)),
		complete = known and complete,
	})
	if managed then
		local other = job.admin_comment
		changes.admin_comment = json_object({ at = os.time(), elastic = directive.format(d), v = 1,
			shape = shape.submitted(job),
			other = other ~= "" and not is_ours(other) and other or nil })
		check_bytes(#changes.admin_comment)
		changes.comment = comment
		changes.requeue = 1
		-- In a federation the job stays on this cluster: no other one has its shape and controller.
		changes.clusters = M.settings.cluster_name
	end
	return changes, summary(d, gpus, gpu_type, note, managed)
end

-- Return the text as one line of printable ASCII: messages repeat what users write.
local function printable(text)
	local shown = text:sub(1, MAX_MESSAGE_BYTES):gsub("[^\32-\126]", "?")
	return shown .. (#text > MAX_MESSAGE_BYTES and "..." or "")
end

-- Run a hook; a refusal is shown to the user, any other error is logged.
local function guarded(hook, ...)
	local sound, result = pcall(hook, ...)
	if sound then
		return slurm.SUCCESS
	elseif type(result) == "table" and result.refusal then
		slurm.log_user("elastic: %s", printable(result.refusal))
		return slurm.ERROR
	end
	slurm.log_error("slurm_elastic: internal error, the job runs unmanaged: %s",
		printable(tostring(result)))
	slurm.log_user("elastic: internal error, this job runs unmanaged; please tell the administrators")
	return slurm.SUCCESS
end

-- Return a line for the user of a batch script that calls srun or torchrun and never esrun; else nil.
local function without_esrun(script)
	if type(script) ~= "string" or script:find("esrun", 1, true) then
		return nil
	end
	for line in script:gmatch("[^\n]+") do
		local first = line:match("^%s*([%w_./-]+)")
		local name = first and first:match("[^/]+$")
		if name == "srun" or name == "torchrun" then
			return "elastic: the script starts " .. name .. " without esrun, so the job will not be resized;"
				.. " write esrun " .. (name == "srun" and "in the place of " or "before ") .. name
		end
	end
	return nil
end

-- For slurm_job_submit; a site's own script calls it last.
function M.job_submit(job_desc, part_list, submit_uid)
	return guarded(function()
		if is_ours(job_desc.admin_comment) then
			job_desc.admin_comment = "" -- only this module writes these
		end
		check_reservation(job_desc, submit_uid)
		local changes, message = plan(job_desc, part_list)
		for name, value in pairs(changes) do
			job_desc[name] = value
		end
		if message then
			slurm.log_user("%s", printable(message))
		end
		local hint = message and changes.admin_comment and without_esrun(job_desc.script)
		if hint then
			slurm.log_user("%s", hint)
		end
	end)
end

-- For slurm_job_modify.
function M.job_modify(job_desc, _, _, modify_uid)
	return guarded(check_reservation, job_desc, modify_uid)
end

M.settings = load_settings()

return M
